"""What this machine has, what each operator would run here, and what a run would need before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlk.config import RunConfig, load_config
from rlk.data import Prompts
from rlk.versions import versions

MODEL = (
    "Memory: weights twice (policy and engine), three times with a KL penalty; fp32 gradients and AdamW's two moments, "
    "and fp32 masters for bfloat16; the published snapshot (two slots and the consumer's copy); one micro-batch's "
    "activations (34 bytes per token, layer and hidden unit in 16 bits, after Korthikanti et al. 2022, nothing "
    "recomputed) and its logits (1 GiB at the most); the engine's KV cache. Time: 2 operations per parameter and token "
    "for a forward, 4 for a backward, at the rate of a matrix product measured here; the weights read once per decoded "
    "token at the bandwidth of a copy measured here."
)
SAMPLE_PROMPTS = 64
MEASURED_SIZE = 1024


def show_machine(console: Console | None = None) -> None:
    """Print hardware, versions, and every operator's choice with the refusals."""
    import torch

    from rlk_ops import Device, current_device
    from rlk_ops.bench import find_target
    from rlk_ops.device import gpu_backend
    from rlk_ops.registry import Unsupported, ops
    from rlk_ops.testing.trial import typical_call

    out = console or Console()
    cpu, accelerator = Device.parse("cpu"), current_device()
    hardware = Table("hardware", "value", title="Machine", title_justify="left")
    hardware.add_row("cpu", f"{cpu.name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used by torch")
    hardware.add_row("memory", f"{cpu.total_memory / 2**30:.1f} GiB, {cpu.free_memory / 2**30:.1f} GiB free")
    if gpu_backend() is None:
        hardware.add_row("accelerator", "none that this torch can use")
    else:
        target = find_target(accelerator)
        known = f"; {target.bf16_tflops:g} TFLOP/s bf16, {target.bandwidth_gbs:g} GB/s" if target else "; peaks unknown"
        hardware.add_row("accelerator", f"{accelerator}: {accelerator.name}, {accelerator.arch}{known}")
    out.print(hardware)
    listed = Table("package", "version", title="Versions", title_justify="left")
    for name, version in versions().items():
        listed.add_row(name, version or "not installed")
    out.print(listed)
    device = accelerator if gpu_backend() else cpu
    chosen = Table("operator", "runs", "why not the others", title=f"Operators on {device}", title_justify="left")
    for name, operator in ops().items():
        call = typical_call(operator, device)
        try:
            choice = operator.selected(**call)
        except Unsupported:
            choice = "none"
        refusals = [f"{other}: {why}" for other, why in operator.explain(**call).items() if why]
        chosen.add_row(name, choice, "; ".join(refusals))
    out.print(chosen)


@dataclass(frozen=True)
class Plan:
    """What a run would need.

    Attributes:
        parameters: of the model.
        memory: part to bytes.
        step_tokens: prompt and completion tokens of one step at the most.
        step_flops: of one step at the most.
        measured_flops: per second, of a matrix product on this machine, just now.
        decode_bytes: that one step's decoding reads of the weights at the most.
        measured_bandwidth: bytes per second of a copy on this machine, just now.
        steps: of the run.
    """

    parameters: int
    memory: dict[str, int]
    step_tokens: int
    step_flops: float
    measured_flops: float
    decode_bytes: float
    measured_bandwidth: float
    steps: int

    @property
    def step_seconds(self) -> float:
        """One step at the measured rates: products, and the weights read once for each decoded token."""
        return self.step_flops / self.measured_flops + self.decode_bytes / self.measured_bandwidth

    @property
    def seconds(self) -> float:
        """All steps."""
        return self.steps * self.step_seconds


def make_plan(config: RunConfig) -> Plan:
    """Count a run's memory and operations, with the prompts that it names and the machine as it is; see `MODEL`.

    Raises:
        InputError: the model or a file cannot be used.
    """
    from rlk.parts import build_policy, load_run_prompts

    model, tokenizer = build_policy(config)
    train, _ = load_run_prompts(config)
    itemsize = {"float32": 4, "bfloat16": 2, "float64": 8}[config.model.dtype]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = model.config.get_text_config()
    width, layers = text.hidden_size, text.num_hidden_layers
    prompt = _longest_prompt(tokenizer, model, train)
    sequences = config.sampling.n * config.loop.prompts_per_step
    tokens = sequences * (prompt + config.sampling.max_tokens)
    batches = -(-sequences // config.loop.max_batch_sequences)
    copies = 3 if config.train.objective.kl_coef > 0 else 2
    master = max(4, itemsize)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or width // text.num_attention_heads
    cached = min(sequences, config.loop.max_batch_sequences) * (prompt + config.sampling.max_tokens)
    micro = min(tokens, max(config.train.micro_batch_tokens, prompt + config.sampling.max_tokens))
    memory = {
        f"weights ({copies} copies)": copies * parameters * itemsize,
        "gradients": parameters * master,
        "optimizer": parameters * master * (3 if itemsize == 2 else 2),
        "weight sync": 3 * parameters * itemsize,
        "activations of a micro-batch": 34 * micro * width * layers * itemsize // 2,
        "logits of a micro-batch": min(1 << 30, micro * text.vocab_size * 4 * 4),
        "KV cache": 2 * cached * layers * heads * head_dim * itemsize,
    }
    forwards = 1 + config.train.epochs * 3 + config.train.recomputes_old_logps + (copies == 3)
    return Plan(
        parameters=parameters,
        memory=memory,
        step_tokens=tokens,
        step_flops=2.0 * parameters * tokens * forwards,
        measured_flops=_measure_flops(config),
        decode_bytes=float(parameters * itemsize * config.sampling.max_tokens * batches),
        measured_bandwidth=_measure_bandwidth(config),
        steps=config.loop.steps,
    )


def show_plan(path: Path, console: Console | None = None) -> None:
    """Print the plan of a configuration file, the model behind its numbers, and whether it fits."""
    from rlk_ops import Device

    config = load_config(path, {})
    plan, out = make_plan(config), console or Console()
    table = Table("what", "GiB", title=f"Memory, {plan.parameters:,} parameters", title_justify="left")
    for name, size in plan.memory.items():
        table.add_row(name, f"{size / 2**30:.2f}")
    total = sum(plan.memory.values())
    table.add_row("total", f"{total / 2**30:.2f}")
    out.print(table)
    free = Device.parse(config.model.device).free_memory
    verdict = "fits" if total < free else "DOES NOT FIT: lower micro_batch_tokens or n, or take a larger machine"
    out.print(f"{free / 2**30:.1f} GiB are free: {verdict}", highlight=False)
    out.print(
        f"time: {plan.step_seconds:.2f} s a step, {plan.seconds / 60:.1f} min for {plan.steps} steps, evaluations, "
        f"loading and per-call overheads aside ({plan.step_tokens} tokens a step at the most; measured here just now: "
        f"{plan.measured_flops / 1e9:.0f} GFLOP/s, {plan.measured_bandwidth / 1e9:.1f} GB/s)",
        highlight=False,
    )
    out.print(MODEL, highlight=False)


def _longest_prompt(tokenizer: object, model: object, prompts: Prompts) -> int:
    from rlk_rollout import RolloutEngine

    engine = RolloutEngine.load(model, tokenizer=tokenizer)  # type: ignore[arg-type]
    return max(len(engine.encode(example)[2]) for example in prompts.examples[:SAMPLE_PROMPTS])


def _measure_flops(config: RunConfig) -> float:
    import torch

    from rlk_ops import Device
    from rlk_ops.bench import time_calls

    device = Device.parse(config.model.device)
    a = torch.randn(MEASURED_SIZE, MEASURED_SIZE, device=device.torch_device, dtype=getattr(torch, config.model.dtype))
    return 2.0 * MEASURED_SIZE**3 / (time_calls(lambda: a @ a, device=device, repeats=5).median / 1e3)


def _measure_bandwidth(config: RunConfig) -> float:
    import torch

    from rlk_ops import Device
    from rlk_ops.bench import time_calls

    device = Device.parse(config.model.device)
    source = torch.ones(64 << 20, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device=device, repeats=5)
    return 2.0 * source.numel() / (timing.median / 1e3)

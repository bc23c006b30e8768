"""The embedded engine over a causal LM of Transformers, and the one place that loads a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlk_ops import lm_head, logp, sample
from rlk_ops.ops.logits import transform_logits
from rlk_ops.ops.sample import sampling_support
from rlk_rollout.causal_lm import Head, evaluation, split
from rlk_rollout.engine import Progress, Request
from rlk_rollout.records import Completion, VersionSpan
from rlk_rollout.sampling import Sampling
from rlk_weightsync.adapters.torch import TorchAdapter

COMPACT_BELOW = 0.75  # of the rows still going; copying the cache costs about one step


def load_model(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[nn.Module, Any]:
    """A causal LM and its tokenizer.

    Args:
        path: a Transformers folder, a `.gguf` file or a folder that holds one, or a hub id.
        dtype: of the weights.
        device: where to put them.

    Raises:
        ValueError: nothing loadable is there; says what was found and what to do.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("loading a model needs Transformers: pip install 'rlk-rollout[transformers]'") from error

    transformers.utils.logging.disable_progress_bar()
    source, options = _locate(Path(path).expanduser(), str(path))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except ImportError as error:
        remedy = "pip install 'rlk-rollout[gguf]'" if options else "install what it names"
        raise ValueError(f"model {path}: {_first_line(error)}: {remedy}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {path}: cannot be loaded: {_first_line(error)}") from error
    return model.to(device), tokenizer


def _locate(path: Path, given: str) -> tuple[str, dict[str, str]]:
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            what = ", ".join(file.name for file in found) or "neither config.json nor a .gguf file"
            raise ValueError(f"model {given}: expected config.json or exactly one .gguf file, found {what}")
        return str(path), {"gguf_file": found[0].name}
    if not path.exists() and (path.is_absolute() or given.startswith((".", "~"))):
        raise ValueError(f"model {given}: no such file or folder")
    return given if not path.exists() else str(path), {}


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


@dataclass
class _Row:
    """One completion while it grows."""

    place: int
    request: Request
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    temperature_logps: list[float] = field(default_factory=list)
    support: list[tuple[int, ...] | None] = field(default_factory=list)
    finish_reason: str | None = None


class TransformersEngine:
    """An :class:`rlk_rollout.engine.Engine` in this process, on a KV cache of Transformers.

    Args:
        model: a causal LM of Transformers; used as it is, in eval mode while it generates.
        tokenizer: its tokenizer; None where prompts come as ids and no text is wanted.
        max_batch_sequences: sequences decoded at once at the most.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, max_batch_sequences: int = 256) -> None:
        if max_batch_sequences < 1:
            raise ValueError(f"max_batch_sequences={max_batch_sequences}: expected at least 1")
        split(model)  # refuses a model of another form now, not at the first prompt
        self._model, self._tokenizer = model, tokenizer
        self.max_batch_sequences = max_batch_sequences

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._tokenizer

    @property
    def model(self) -> nn.Module:
        """The causal LM."""
        return self._model

    @property
    def context_length(self) -> int | None:
        """The model's `max_position_embeddings`, or None where its configuration names none."""
        config: Any = self._model.config
        return getattr(config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def adapter(self) -> TorchAdapter:
        """Copies published weights into the module; there is no cache between calls to reset."""
        return TorchAdapter(self._model)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end a completion, from the generation config, the config and the tokenizer."""
        model: Any = self._model
        sources = (getattr(model, "generation_config", None), model.config.get_text_config(), self._tokenizer)
        found: set[int] = set()
        for source in sources:
            ids = getattr(source, "eos_token_id", None)
            found.update(() if ids is None else [ids] if isinstance(ids, int) else ids)
        return frozenset(found)

    def draw(
        self, requests: Sequence[Request], sampling: Sampling, *, version: int, progress: Progress | None = None
    ) -> list[Completion]:
        """One completion per request, in order; see :class:`rlk_rollout.engine.Engine`."""
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer; give stop_token_ids instead")
        rows = [_Row(place, request, self._limit(request, sampling)) for place, request in enumerate(requests)]
        finished = 0
        with evaluation(self._model):
            for batch in self._batches(rows):
                for newly in _Decoding(self, batch, sampling).steps():
                    finished += newly
                    if newly and progress is not None:
                        progress(finished, len(rows))
        return [self._record(row, sampling, version) for row in rows]

    def _limit(self, request: Request, sampling: Sampling) -> int:
        context = self.context_length
        room = sampling.max_tokens if context is None else context - len(request.prompt_ids)
        return min(sampling.max_tokens, room)

    def _batches(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Rows of one prompt side by side, prompts of like length together."""
        order = sorted(rows, key=lambda row: (-len(row.request.prompt_ids), row.request.prompt, row.place))
        for start in range(0, len(order), self.max_batch_sequences):
            yield order[start : start + self.max_batch_sequences]

    def stops(self, row: _Row, sampling: Sampling, ends: frozenset[int]) -> str | None:
        """Why the row ends after its newest token, or None."""
        if row.token_ids[-1] in ends:
            return "stop"
        if sampling.stop and any(stop in self._decode(row.token_ids) for stop in sampling.stop):
            return "stop"
        return "length" if len(row.token_ids) >= row.limit else None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True) if self._tokenizer else ""

    def _record(self, row: _Row, sampling: Sampling, version: int) -> Completion:
        text = self._decode(row.token_ids)
        cuts = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
        assert row.finish_reason is not None
        return Completion(
            prompt_ids=row.request.prompt_ids,
            token_ids=tuple(row.token_ids),
            text=text[: min(cuts)] if cuts else text,
            logps=tuple(row.logps),
            temperature_logps=tuple(row.temperature_logps),
            support=tuple(row.support) if any(kept is not None for kept in row.support) else None,
            finish_reason=row.finish_reason,
            spans=(VersionSpan(0, len(row.token_ids), version),),
            seed=row.request.seed,
        )


class _Decoding:
    """One batch from prefill to its last token. B rows, P distinct prompts, L columns of left-padded prompt."""

    def __init__(self, engine: TransformersEngine, rows: list[_Row], sampling: Sampling) -> None:
        self.engine, self.rows, self.sampling = engine, rows, sampling
        body, self.head = split(engine.model)
        self.body: Any = body
        self.device = self.head.weight.device
        self.ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else engine.end_ids)
        self.seeds = self._column([row.request.seed for row in rows])
        self.lengths = self._column([len(row.request.prompt_ids) for row in rows])

    def steps(self) -> Iterator[int]:
        """Decode; yields after each step how many rows it finished."""
        hidden, self.cache, self.mask = self._prefill()
        for step in range(max(row.limit for row in self.rows)):
            tokens = self._draw(hidden, step)
            ended = [row for row in self.rows if row.finish_reason is None and self._ends(row)]
            yield len(ended)
            going = [place for place, row in enumerate(self.rows) if row.finish_reason is None]
            if not going:
                return
            if len(going) <= COMPACT_BELOW * len(self.rows):
                tokens = self._compact(going, tokens)
            hidden = self._forward(tokens, step)

    def _ends(self, row: _Row) -> bool:
        row.finish_reason = self.engine.stops(row, self.sampling, self.ends)
        return row.finish_reason is not None

    def _prefill(self) -> tuple[Tensor, Any, Tensor]:
        """Last hidden states (B, H), the cache and the mask (B, L), from one pass over each distinct prompt."""
        prompts = list({row.request.prompt: row.request.prompt_ids for row in self.rows}.values())
        places = {row.request.prompt: None for row in self.rows}
        counts = [sum(row.request.prompt == prompt for row in self.rows) for prompt in places]
        width = max(map(len, prompts))
        ids = self._column([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = self._column([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self.body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        repeat = torch.repeat_interleave(torch.arange(len(prompts), device=self.device), self._column(counts))
        cache = output.past_key_values
        if len(repeat) != len(prompts):
            cache.batch_select_indices(repeat)
        return output[0][:, -1][repeat], cache, mask[repeat]

    def _forward(self, tokens: Tensor, step: int) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        # A finished row that is not dropped yet may have reached the end of the context; its states are not read.
        last = (self.engine.context_length or self.mask.shape[1]) - 1
        positions = (self.lengths + step).clamp(max=last)[:, None]
        output = self.body(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = output.past_key_values
        return output[0][:, -1]

    def _draw(self, hidden: Tensor, step: int) -> Tensor:
        """Draw a token for every row and record it where the row still goes."""
        sampling, options = self.sampling, self._truncation()
        logits = _logits(self.head, hidden)
        positions = torch.full_like(self.seeds, step)
        tokens, logps = sample(
            logits, temperature=sampling.temperature, **options, seeds=self.seeds, positions=positions
        )
        plain: Any = logps
        supports: list[tuple[int, ...] | None] | None = None
        if sampling.truncates and sampling.temperature > 0:
            plain = logp(logits, tokens.clamp(min=0), temperature=sampling.temperature)
            supports = _kept_ids(sampling_support(logits, temperature=sampling.temperature, **options))
        columns = (tokens.tolist(), logps.tolist(), plain.tolist(), supports or [None] * len(self.rows))
        for row, token, processed, temperature_only, kept in zip(self.rows, *columns, strict=True):
            if row.finish_reason is None:
                if token < 0:
                    raise ValueError(f"prompt {row.request.prompt}: the model's logits at token {step} are not usable "
                                     "(NaN, +inf, or -inf everywhere); its weights are broken")  # fmt: skip
                row.token_ids.append(token)
                row.logps.append(processed)
                row.temperature_logps.append(temperature_only)
                row.support.append(kept)
        return tokens

    def _truncation(self) -> dict[str, Any]:
        return {name: getattr(self.sampling, name) for name in ("top_k", "top_p", "min_p")}

    def _compact(self, going: list[int], tokens: Tensor) -> Tensor:
        """Drop the finished rows from everything that the next step reads."""
        index = self._column(going)
        self.rows = [self.rows[place] for place in going]
        self.cache.batch_select_indices(index)
        self.mask, self.seeds, self.lengths = self.mask[index], self.seeds[index], self.lengths[index]
        return tokens[index]

    def _column(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _logits(head: Head, hidden: Tensor) -> Tensor:
    raw: Tensor = lm_head(hidden, head.weight, bias=head.bias, out_dtype=_wide(hidden.dtype))
    return transform_logits(raw, logit_scale=head.logit_scale, softcap=head.softcap)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _kept_ids(support: Tensor) -> list[tuple[int, ...] | None]:
    """Per row the ids inside a (B, V) support; None where all are."""
    counts = support.sum(1).tolist()
    ids = support.nonzero()[:, 1].split(counts)
    return [None if count == support.shape[1] else tuple(row.tolist()) for row, count in zip(ids, counts, strict=True)]

"""Log-probs in tiles of the logits, eager PyTorch: what CPUs and GPUs without a kernel run.

The forward keeps a running maximum and sum per row over tiles of the vocabulary; the backward makes each tile again
from the saved log-sum-exp. Tiles are at most `budget` bytes, so (N, V) never exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_ops.ops.logits import NEVER, ActiveRows, Transform
from rlk_ops.ops.precision import ieee_float32, wide

TILES_AT_ONCE = 4  # logits, their exponentials and two temporaries of the same size
LEAST_COLUMNS = 512  # narrower tiles spend more on their overhead than on their product


def chunked_log_prob(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: ActiveRows, *, entropy: bool, budget: int
) -> tuple[Tensor, Tensor | None]:
    """(N,) log-probs and entropies (or None) of the rows that count.

    Args:
        hidden: (N, H) of those rows.
        weight: (V, H).
        bias: (V,) or None.
        rows: their token ids and transform.
        entropy: whether entropies are wanted.
        budget: bytes of a tile's intermediates at the most; a single row of `LEAST_COLUMNS` columns is the floor.
    """
    result: tuple[Tensor, Tensor | None] = _Chunked.apply(hidden, weight, bias, rows, entropy, budget)
    return result


def _tiles(count: int, vocabulary: int, itemsize: int, budget: int) -> tuple[list[slice], list[slice]]:
    """Row blocks and column blocks; one of each where everything fits."""
    elements = max(1, budget // (TILES_AT_ONCE * itemsize))
    columns = max(1, min(vocabulary, max(LEAST_COLUMNS, elements // max(count, 1))))
    block = max(1, min(count, elements // columns))
    return list(_blocks(count, block)), list(_blocks(vocabulary, columns))


def _blocks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


class _Head:
    """The head and the transform, as tiles of transformed logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: Transform) -> None:
        self.hidden, self.weight, self.bias, self.transform = wide(hidden), weight, bias, transform

    def tile(self, rows: slice, columns: slice) -> Tensor:
        raw = self.hidden[rows] @ wide(self.weight[columns]).t()
        if self.bias is not None:
            raw += wide(self.bias[columns])
        return self.transform.rows(rows).apply(raw, columns.start)


class _Running:
    """Log-sum-exp, target logit and mean logit of a block of rows over tiles of the vocabulary that arrive in order."""

    def __init__(self, token_ids: Tensor, like: Tensor, entropy: bool) -> None:
        zeros = torch.zeros(len(token_ids), dtype=like.dtype, device=like.device)
        self.token_ids, self.entropy = token_ids, entropy
        self.maximum, self.sum, self.centred, self.target = zeros + NEVER, zeros, zeros, zeros

    def add(self, x: Tensor, columns: slice) -> None:
        maximum = torch.maximum(self.maximum, x.amax(1))
        # A row without a finite logit so far is centred on 0, where its exponentials are 0 and not NaN.
        centre = torch.where(maximum == NEVER, 0.0, maximum)
        rescale = torch.exp(self.maximum - centre)
        shifted = x - centre[:, None]
        exponentials = torch.exp(shifted)
        if self.entropy:
            moved = torch.where(self.sum == 0, 0.0, self.centred + self.sum * (self.maximum - centre))
            finite = torch.where(x == NEVER, 0.0, shifted)
            self.centred = moved * rescale + (exponentials * finite).sum(1)
        self.sum = self.sum * rescale + exponentials.sum(1)
        self.maximum = maximum
        inside = (self.token_ids >= columns.start) & (self.token_ids < columns.stop)
        local = torch.where(inside, self.token_ids - columns.start, 0)
        self.target = torch.where(inside, x.gather(1, local[:, None])[:, 0], self.target)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exp, log-prob, entropy."""
        log_sum = torch.log(self.sum)
        centre = torch.where(self.maximum == NEVER, 0.0, self.maximum)
        normaliser = centre + log_sum
        return normaliser, (self.target - centre) - log_sum, log_sum - self.centred / self.sum


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: ActiveRows, entropy: bool, budget: int
    ) -> tuple[Tensor, Tensor | None]:
        head = _Head(hidden, weight, bias, rows.transform)
        blocks, columns = _tiles(len(hidden), len(weight), head.hidden.element_size(), budget)
        outputs = head.hidden.new_empty(3, len(hidden))
        with ieee_float32():
            for block in blocks:
                running = _Running(rows.token_ids[block], head.hidden, entropy)
                for part in columns:
                    running.add(head.tile(block, part), part)
                outputs[:, block] = torch.stack(running.result())
        normaliser, logps, entropies = outputs.unbind(0)
        ctx.save_for_backward(hidden, weight, bias, normaliser, logps, entropies)
        ctx.rows, ctx.entropy, ctx.tiles = rows, entropy, (blocks, columns)
        return logps.clone(), entropies.clone() if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logp_grad: Tensor, entropy_grad: Tensor | None) -> Any:
        hidden, weight, bias, normaliser, logps, entropies = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.rows.transform)
        entropy_grad = entropy_grad if ctx.entropy else None
        upstream = _Upstream(ctx.rows.token_ids, normaliser, logps, entropies, logp_grad, entropy_grad)
        with ieee_float32():
            return (*_gradients(head, upstream, ctx.tiles, ctx.needs_input_grad[:3]), None, None, None)


class _Upstream:
    """What the backward of a tile needs of its rows, and the tile's gradient in the transformed logits."""

    def __init__(
        self,
        token_ids: Tensor,
        normaliser: Tensor,
        logps: Tensor,
        entropies: Tensor,
        logp_grad: Tensor,
        entropy_grad: Tensor | None,
    ) -> None:
        self.token_ids, self.normaliser, self.logps, self.entropies = token_ids, normaliser, logps, entropies
        self.logp_grad, self.entropy_grad = logp_grad, entropy_grad

    def gradient(self, x: Tensor, rows: slice, columns: slice) -> Tensor:
        table = x - self.normaliser[rows, None]
        probabilities = torch.exp(table)
        gradient = probabilities * -self.logp_grad[rows, None]
        ids = self.token_ids[rows]
        at = ((ids >= columns.start) & (ids < columns.stop)).nonzero()[:, 0]
        # 1 - p of the target without cancellation, as p approaches 1.
        gradient[at, ids[at] - columns.start] = -torch.expm1(self.logps[rows][at]) * self.logp_grad[rows][at]
        if self.entropy_grad is not None:
            surprise = torch.where(x == NEVER, 0.0, table) + self.entropies[rows, None]
            gradient -= probabilities * surprise * self.entropy_grad[rows, None]
        return gradient


def _gradients(
    head: _Head, upstream: _Upstream, tiles: tuple[list[slice], list[slice]], needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    blocks, columns = tiles
    dtype = head.weight.dtype
    hidden_grad = torch.zeros_like(head.hidden) if needed[0] else None
    weight_grad = torch.zeros_like(head.weight, memory_format=torch.contiguous_format) if needed[1] else None
    bias_grad = torch.zeros_like(head.bias) if needed[2] and head.bias is not None else None
    for part in columns:
        weight_part = wide(head.weight[part])
        # One tile's column block at a time in fp32, rounded once.
        weight_sum = torch.zeros_like(weight_part) if needed[1] else None
        bias_sum = weight_part.new_zeros(len(weight_part)) if bias_grad is not None else None
        for block in blocks:
            x = head.tile(block, part)
            gradient = upstream.gradient(x, block, part) * head.transform.rows(block).derivative(x)
            gradient = torch.where(x == NEVER, 0.0, gradient)
            if hidden_grad is not None:
                hidden_grad[block].addmm_(gradient, weight_part)
            if weight_sum is not None:
                weight_sum.addmm_(gradient.t(), head.hidden[block])
            if bias_sum is not None:
                bias_sum += gradient.sum(0)
        if weight_grad is not None and weight_sum is not None:
            weight_grad[part] = weight_sum.to(dtype)
        if bias_grad is not None and bias_sum is not None:
            bias_grad[part] = bias_sum.to(dtype)
    return None if hidden_grad is None else hidden_grad.to(dtype), weight_grad, bias_grad

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ops import group_advantages


def oracle(rows: list[list[float | None]], scale: str, ddof: int, eps: float) -> list[list[float]]:
    """Plain Python; None is a masked slot."""

    def deviation(values: list[float]) -> float:
        if len(values) <= ddof:
            return 0.0
        mean = statistics.fmean(values)
        return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))

    everything = deviation([v for row in rows for v in row if v is not None])
    result = []
    for row in rows:
        kept = [v for v in row if v is not None]
        std = {"group": deviation(kept), "batch": everything, "none": 0.0}[scale]
        mean = statistics.fmean(kept) if kept else 0.0
        divisor = 1.0 if scale == "none" else std + eps
        zero = len(set(kept)) <= 1 or (scale != "none" and std == 0)
        result.append([0.0 if v is None or zero else (v - mean) / divisor for v in row])
    return result


@given(
    rows=st.integers(1, 5).flatmap(
        lambda g: st.lists(
            st.lists(st.none() | st.sampled_from([0.0, 0.1, 0.3, 1.0]) | st.floats(-5, 5), min_size=g, max_size=g),
            min_size=1, max_size=4,
        )
    ),
    scale=st.sampled_from(["group", "batch", "none"]),
    ddof=st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_equals_plain_python(rows: list[list[float | None]], scale: str, ddof: int) -> None:
    rewards = torch.tensor([[math.nan if v is None else v for v in row] for row in rows], dtype=torch.float64)
    result = group_advantages(rewards, mask=~rewards.isnan(), scale=scale, ddof=ddof, eps=1e-3)
    expected = torch.tensor(oracle(rows, scale, ddof, 1e-3), dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
def test_a_constant_group_is_exactly_zero(scale: str, dtype: torch.dtype, size: int, value: float) -> None:
    rewards = torch.full((2, size), value, dtype=dtype)
    rewards[1] = torch.arange(size)
    result = group_advantages(rewards, scale=scale, eps=0.0)
    assert torch.equal(result[0], torch.zeros(size, dtype=result.dtype))
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert size == 1 or (result[1] != 0).any()


def test_a_failed_sample_leaves_the_statistics() -> None:
    rewards = torch.tensor([[1.0, 0.0, math.nan, 0.0, math.inf]])
    kept = torch.tensor([[1, 1, 0, 1, 0]])
    expected = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    result = group_advantages(rewards, mask=kept)
    assert torch.equal(result[kept.bool()], expected[0])
    assert torch.equal(result[0, [2, 4]], torch.zeros(2))


def test_two_passes_keep_a_small_spread_on_a_large_offset() -> None:
    spread = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    torch.testing.assert_close(group_advantages(spread + 2**20), group_advantages(spread), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    assert group_advantages(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("case", group_advantages.list_errors(), ids=lambda c: c.name)
def test_wrong_calls_raise(case: Any) -> None:
    with pytest.raises(case.raises, match=case.match):
        group_advantages(**case.build(torch.Generator().manual_seed(0)))

"""`sample`: its generator against published vectors, its distribution by chi-square, its support by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlk_ops import logp, sample
from rlk_ops.ops.sample import sampling_support
from rlk_ops.ops.sample.philox import gumbel, philox4x32, random_words

# Random123's known-answer vectors for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, result: str) -> None:
    drawn = philox4x32(_words(counter), _words(key))
    assert " ".join(f"{int(word):08x}" for word in drawn) == result


def test_random_words_layout_is_key_seed_counter_block_position() -> None:
    seed, position, columns = -(2**40) - 12345, (7 << 33) + 5, 11
    words = random_words(torch.tensor([seed]), torch.tensor([position]), columns)[0]
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF))
    for column in range(columns):
        counter = [column // 4, position & 0xFFFFFFFF, position >> 32, 0]
        expected = philox4x32([torch.tensor(c) for c in counter], key)[column % 4]
        assert int(words[column]) == int(expected)


def test_gumbel_is_the_formula_and_has_gumbel_moments() -> None:
    seeds, positions = torch.arange(64), torch.arange(64) * 1000
    noise = gumbel(seeds, positions, 4099, torch.float64)
    v = (random_words(seeds, positions, 4099).numpy() + 0.5) / 2.0**32
    np.testing.assert_allclose(noise.numpy(), -np.log(-np.log1p(-np.minimum(v, 1 - 2.0**-24))), rtol=1e-12, atol=1e-14)
    assert noise.mean().item() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert torch.isfinite(gumbel(seeds, positions, 4099, torch.float32)).all()


def _chi_square_critical(freedom: int, z: float = 4.5) -> float:
    """Wilson-Hilferty upper quantile; z = 4.5 is p = 3.4e-6."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1, "temperature": 1.4},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_draws_follow_the_processed_distribution(options: dict[str, Any], vary: str) -> None:
    draws, columns = 40_000, 18
    logits = torch.randn(columns, generator=torch.Generator().manual_seed(5)) * 1.5
    logits[3] = -torch.inf
    constant, counting = torch.full((draws,), 1234567), torch.arange(draws)
    keys = {"seeds": counting, "positions": constant} if vary == "seeds" else {"seeds": constant, "positions": counting}
    token_ids, logps = sample(logits.expand(draws, columns), **options, **keys)
    expected = _processed(logits.double().numpy(), **options)
    counts = np.bincount(token_ids.numpy(), minlength=columns)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = (((counts - draws * expected) ** 2)[possible] / (draws * expected[possible])).sum()
    assert statistic < _chi_square_critical(int(possible.sum()) - 1)
    np.testing.assert_allclose(logps.exp().numpy(), expected[token_ids.numpy()], rtol=2e-6)


def _processed(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
) -> np.ndarray:
    """The processed distribution of one row, token by token in plain Python."""
    weights = [math.exp(x / temperature) for x in logits]
    kept = [i for i in range(len(weights)) if weights[i] > 0]
    if top_k is not None:
        edge = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        kept = [i for i in kept if weights[i] >= edge]
    if top_p is not None and top_p < 1:
        total = sum(weights[i] for i in kept)
        kept = [i for i in kept if sum(weights[j] for j in kept if weights[j] > weights[i]) < top_p * total]
    kept = [i for i in kept if weights[i] >= min_p * max(weights)]
    total = sum(weights[i] for i in kept)
    return np.array([weights[i] / total if i in kept else 0.0 for i in range(len(weights))])


@pytest.mark.parametrize("seed", range(30))
def test_support_is_exact_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, columns = 6, int(rng.integers(1, 40))
    logits = torch.from_numpy(rng.normal(size=(batch, columns)) * rng.choice([0.1, 1.0, 4.0]))
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2  # many ties
    logits[torch.from_numpy(rng.random((batch, columns))) < 0.2] = -torch.inf
    logits[:, 0] = 0.25
    options = {
        "temperature": rng.choice([0.5, 1.0, 1.7], batch),
        "top_k": rng.integers(1, columns + 5, batch),
        "top_p": rng.choice([0.05, 0.3, 0.77, 0.95, 1.0], batch),
        "min_p": rng.choice([0.0, 0.03, 0.4], batch),
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.7}
    support = sampling_support(logits, **{name: torch.from_numpy(value) for name, value in chosen.items()})
    for row in range(batch):
        scalars = {name: value[row].item() for name, value in chosen.items()}
        expected = _processed(logits[row].numpy(), **scalars) > 0
        assert support[row].tolist() == expected.tolist(), scalars
        assert sampling_support(logits[row : row + 1], **scalars)[0].tolist() == expected.tolist()


def test_nucleus_larger_than_the_first_candidates() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[1] *= 8  # its nucleus is small: both paths in one batch
    support = sampling_support(logits, top_p=0.97)
    for row in range(3):
        weights = np.exp(logits[row].numpy())
        order = np.argsort(-weights)
        size = int(np.searchsorted(np.cumsum(weights[order]), 0.97 * weights.sum())) + 1
        assert sorted(order[:size].tolist()) == support[row].nonzero().flatten().tolist()
    assert support.sum(1)[0] > 1024 > support.sum(1)[1]


def test_ties_at_the_boundary_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    assert sampling_support(logits, top_k=3)[0].tolist() == [True, True, True, True, True, False]
    assert sampling_support(logits, top_k=2)[0].tolist() == [False, True, False, True, False, False]
    uniform = torch.zeros(1, 8)
    assert sampling_support(uniform, top_p=0.1).all()
    assert sampling_support(torch.tensor([[0.0, 0.0, -5.0]]), min_p=1.0)[0].tolist() == [True, True, False]


def test_top_p_acts_on_what_top_k_kept() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the whole, 0.4 + 0.3 < 0.75 keeps three; renormalised over the two of top-k, 0.4 / 0.7 < 0.75 keeps both.
    assert sampling_support(logits, top_p=0.75)[0].tolist() == [True, True, True, False]
    assert sampling_support(logits, top_k=2, top_p=0.75)[0].tolist() == [True, True, False, False]
    assert sampling_support(logits, top_k=2, top_p=0.5)[0].tolist() == [True, False, False, False]


def test_greedy_takes_the_lowest_id_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, -torch.inf, 3.0, 0.0]])
    keys = {"seeds": torch.tensor([1, 2]), "positions": torch.tensor([0, 9])}
    token_ids, logps = sample(logits, temperature=0.0, top_k=1, top_p=0.1, **keys)
    assert token_ids.tolist() == [1, 0]
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(logps.double(), expected[[0, 1], [1, 0]], rtol=1e-6, atol=1e-7)
    assert sampling_support(logits, temperature=0.0, top_k=1).tolist() == [[True] * 4, [True, False, True, True]]
    mixed, _ = sample(logits, temperature=torch.tensor([0.0, 1.0]), **keys)
    alone, _ = sample(logits[1:], **{name: value[1:] for name, value in keys.items()})
    assert mixed.tolist() == [1, alone.item()]


def test_a_row_draws_the_same_wherever_it_stands() -> None:
    generator = torch.Generator().manual_seed(2)
    batch, columns = 21, 1537
    logits = torch.randn(batch, columns, generator=generator) * 3
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    positions = torch.randint(0, 5000, (batch,), generator=generator)
    options = {"temperature": torch.rand(batch, generator=generator), "top_p": torch.rand(batch, generator=generator)}
    token_ids, logps = sample(logits, **options, seeds=seeds, positions=positions)
    for rows in (torch.tensor([4]), torch.randperm(batch, generator=generator), torch.arange(3, 20)):
        part = {name: value[rows] for name, value in options.items()}
        ids, values = sample(logits[rows], **part, seeds=seeds[rows], positions=positions[rows])
        assert torch.equal(ids, token_ids[rows])
        assert torch.equal(values, logps[rows])
    other, _ = sample(logits, **options, seeds=seeds, positions=positions + 1)
    assert not torch.equal(other, token_ids)


def test_a_scalar_option_is_the_same_as_one_per_row() -> None:
    logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(3))
    keys = {"seeds": torch.arange(5), "positions": torch.arange(5)}
    scalars = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    rows = {name: torch.full((5,), value) for name, value in scalars.items()}
    one, other = sample(logits, **scalars, **keys), sample(logits, **rows, **keys)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_unusable_rows_are_named_by_minus_one_and_spoil_no_other() -> None:
    generator = torch.Generator().manual_seed(4)
    clean = torch.randn(6, 50, generator=generator)
    keys = {"seeds": torch.arange(6), "positions": torch.arange(6)}
    spoilt = clean.clone()
    spoilt[0] = -torch.inf
    spoilt[2, 7] = torch.nan
    spoilt[4, 7] = torch.inf
    choices: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}]
    for options in choices:
        expected, expected_logps = sample(clean, **options, **keys)
        token_ids, logps = sample(spoilt, **options, **keys)
        assert token_ids[[0, 2, 4]].tolist() == [-1, -1, -1]
        assert logps[[0, 2, 4]].isnan().all()
        assert torch.equal(token_ids[[1, 3, 5]], expected[[1, 3, 5]])
        assert torch.equal(logps[[1, 3, 5]], expected_logps[[1, 3, 5]])
        assert sampling_support(spoilt, **options).any(1).tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logps_are_wide_whatever_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 77, generator=torch.Generator().manual_seed(6)).to(dtype).requires_grad_()
    token_ids, logps = sample(logits, temperature=0.8, seeds=torch.arange(4), positions=torch.arange(4))
    assert logps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not logps.requires_grad
    expected = torch.log_softmax(logits.detach().double() / 0.8, -1).gather(1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 1.3, "top_k": 200, "min_p": 0.01}]
)
def test_logps_have_the_bits_of_logp(options: dict[str, Any], dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 1543, generator=torch.Generator().manual_seed(8)) * 3).to(dtype)
    token_ids, logps = sample(logits, **options, seeds=torch.arange(9), positions=torch.arange(9))
    support = sampling_support(logits, **options)
    temperature = options.get("temperature", 1.0)
    assert torch.equal(logp(logits, token_ids, temperature=temperature, support=support, impl="reference"), logps)
    by_row = torch.full((9,), temperature)
    assert torch.equal(logp(logits, token_ids, temperature=by_row, support=support, impl="reference"), logps)


def test_a_banned_column_is_never_drawn_and_strides_do_not_matter() -> None:
    base = torch.randn(64, 600, generator=torch.Generator().manual_seed(7))
    base[:, ::3] = -torch.inf
    keys = {"seeds": torch.arange(64), "positions": torch.zeros(64, dtype=torch.int64)}
    token_ids, logps = sample(base, **keys)
    assert (token_ids % 3 != 0).all()
    transposed = base.t().contiguous().t()
    again, again_logps = sample(transposed, **keys)
    assert torch.equal(token_ids, again)
    assert torch.equal(logps, again_logps)

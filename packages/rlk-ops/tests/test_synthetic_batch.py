from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlk_ops import Objective, SyntheticBatch, grpo_loss, linear_grpo_loss, policy_loss

SIZES: dict[str, Any] = {"max_length": 9, "vocabulary": 23, "hidden_size": 6, "with_logits": True}


def tensors(batch: SyntheticBatch) -> dict[str, torch.Tensor]:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if value is not None}


def test_one_seed_gives_one_batch() -> None:
    first, again, other = (SyntheticBatch.draw(2, 3, seed=seed, **SIZES) for seed in (7, 7, 8))
    for name, value in tensors(first).items():
        torch.testing.assert_close(value, tensors(again)[name], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(first.token_ids, other.token_ids)


def test_shapes_lengths_and_poison() -> None:
    batch = SyntheticBatch.draw(5, 4, seed=1, min_length=2, **SIZES)
    lengths = batch.mask.sum(1)
    assert lengths.max() == 9
    assert lengths.min() >= 2
    assert len(lengths.unique()) > 2
    assert torch.equal(batch.mask, torch.arange(9) < lengths[:, None])
    for name, value in tensors(batch).items():
        if value.shape[:2] == (20, 9) and name != "mask":
            masked = value[~batch.mask]
            assert masked.isnan().all() if value.is_floating_point() else (masked == -1).all(), name
            assert value[batch.mask].isfinite().all()
    assert batch.rewards.shape == (5, 4)
    assert batch.advantages.shape == (20,)


def test_log_probs_belong_to_hidden_states_and_logits() -> None:
    batch = SyntheticBatch.draw(2, 3, seed=2, dtype=torch.float64, **SIZES)
    table = torch.log_softmax(batch.hidden @ batch.weight.T, -1)[batch.mask]
    expected = table.gather(-1, batch.token_ids[batch.mask][:, None])[:, 0]
    torch.testing.assert_close(batch.logps[batch.mask], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.log_softmax(batch.logits, -1)[batch.mask], table, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.entropy[batch.mask], -(table.exp() * table).sum(-1), rtol=1e-12, atol=1e-12)


def test_drift_is_what_was_asked_for() -> None:
    batch = SyntheticBatch.draw(40, 8, max_length=64, drift=0.05, seed=3)
    near, far, engine = (
        (a - b)[batch.mask].std()
        for a, b in (
            (batch.old_logps, batch.logps),
            (batch.ref_logps, batch.logps),
            (batch.rollout_logps, batch.old_logps),
        )
    )
    assert 0.045 < near < 0.055
    assert 0.135 < far < 0.165
    assert 0.0045 < engine < 0.0055
    assert all((x[batch.mask] <= 0).all() for x in (batch.logps, batch.old_logps, batch.ref_logps, batch.rollout_logps))


def test_advantages_are_those_of_the_rewards() -> None:
    batch = SyntheticBatch.draw(6, 4, seed=4)
    centred = batch.rewards - batch.rewards.mean(1, keepdim=True)
    scaled = centred / (batch.rewards.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(batch.advantages, scaled.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_loss_takes_it_padded_and_packed(dtype: torch.dtype) -> None:
    batch = SyntheticBatch.draw(2, 3, seed=7, min_length=0, dtype=dtype, **SIZES)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert batch.hidden.dtype == batch.logits.dtype == dtype
    assert batch.logps.dtype == batch.rewards.dtype == batch.advantages.dtype == wide
    losses = []
    for b in (batch, batch.packed()):
        shared = b.policy_arguments() | {"objective": Objective("gspo", clip_low=0.1, clip_high=0.1)}
        losses += [
            policy_loss(b.logps, **shared).loss,
            grpo_loss(b.logits, b.token_ids, **shared).loss,
            linear_grpo_loss(b.hidden, b.weight, b.token_ids, **shared).loss,
        ]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=tolerance, atol=tolerance)
    assert losses[0] != 0


def test_a_packed_batch_is_not_packed_again() -> None:
    with pytest.raises(ValueError, match="packed already"):
        SyntheticBatch.draw().packed().packed()


@pytest.mark.parametrize(
    "wrong",
    [{"prompts": 0}, {"samples": 0}, {"max_length": 0}, {"min_length": 17}, {"vocabulary": 1}, {"hidden_size": 0}],
)
def test_sizes_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}:"):
        SyntheticBatch.draw(**wrong)

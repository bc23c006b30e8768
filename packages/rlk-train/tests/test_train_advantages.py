import statistics
from dataclasses import replace

import pytest

from rlk_rollout.records import Scores
from rlk_train import TrainConfig, rollout_advantages
from rlk_train.samples import select_samples


def scored(rollout, rewards):
    """The rollout with these rewards, group by group; None is a completion whose reward failed."""
    groups = []
    for group, values in zip(rollout.groups, rewards):
        completions = tuple(
            replace(c, scores=Scores(reward=v, rewards={}, ref_logps=None, error=None if v is not None else "boom"))
            for c, v in zip(group.completions, values)
        )
        groups.append(replace(group, completions=completions))
    return replace(rollout, groups=tuple(groups))


def test_values_against_the_statistics_module(make_rollout):
    rewards = [[0.0, 1.0, 0.5, 0.25], [3.0, 1.0, 1.0, 2.0]]
    got = rollout_advantages(scored(make_rollout(), rewards), eps=1e-6)
    expected = [(r - statistics.mean(g)) / (statistics.stdev(g) + 1e-6) for g in rewards for r in g]
    assert got.values == pytest.approx(expected, abs=1e-12)
    assert got.metrics["advantages/abs_mean"] == pytest.approx(statistics.mean(map(abs, expected)), abs=1e-12)
    assert got.metrics["groups/degenerate"] == 0.0


def test_a_failed_completion_leaves_its_group_s_statistics(make_rollout):
    got = rollout_advantages(scored(make_rollout(), [[0.0, None, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0]]), eps=0.0)
    alive = [0.0, 1.0, 0.5]
    expected = [(r - 0.5) / statistics.stdev(alive) for r in alive]
    assert got.values[1] is None
    assert [got.values[i] for i in (0, 2, 3)] == pytest.approx(expected, abs=1e-12)
    assert got.values[4:] == (0.0,) * 4
    assert got.metrics["groups/degenerate"] == 0.5


def test_ragged_groups(make_rollout):
    rollout = scored(make_rollout(), [[0.0, 1.0, 0.5, 0.25], [3.0, 1.0, 1.0, 2.0]])
    short = replace(rollout.groups[0], completions=rollout.groups[0].completions[:2])
    got = rollout_advantages(replace(rollout, groups=(short, rollout.groups[1])), scale="none")
    assert got.values == pytest.approx([-0.5, 0.5, 1.25, -0.75, -0.75, 0.25], abs=1e-12)


def test_failed_and_truncated_completions_are_dropped_after_the_baseline(make_rollout):
    rollout = scored(make_rollout(), [[0.0, None, 1.0, 0.5], [3.0, 1.0, 1.0, 2.0]])
    cut = replace(rollout.groups[1].completions[0], finish_reason="length")
    second = replace(rollout.groups[1], completions=(cut, *rollout.groups[1].completions[1:]))
    rollout = replace(rollout, groups=(rollout.groups[0], second))
    config = TrainConfig(mask_truncated=True, advantage_scale="none")
    kept = select_samples(rollout, config).samples
    assert [s.advantage for s in kept] == pytest.approx([-0.5, 0.5, 0.0, -0.75, -0.75, 0.25], abs=1e-12)
    assert len(select_samples(rollout, replace(config, mask_truncated=False)).samples) == 7


def test_an_unscored_rollout_is_refused(make_rollout):
    rollout = make_rollout()
    first = rollout.groups[0]
    bare = replace(first, completions=(replace(first.completions[0], scores=None), *first.completions[1:]))
    with pytest.raises(ValueError, match="completion 0 of group 0 has no scores"):
        rollout_advantages(replace(rollout, groups=(bare, rollout.groups[1])))

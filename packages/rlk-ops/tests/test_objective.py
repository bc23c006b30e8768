from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlk_ops import Mismatch, Objective, Reduction
from rlk_ops.ops.objective import OBJECTIVES


@pytest.mark.parametrize(
    ("name", "clip", "mode"),
    [
        ("grpo", (0.2, 0.2), "sequence_mean"),
        ("bnpo", (0.2, 0.2), "token_mean"),
        ("dr_grpo", (0.2, 0.2), "length_normalized"),
        ("dapo", (0.2, 0.28), "token_mean"),
        ("gspo", (3e-4, 4e-4), "sequence_mean"),
        ("cispo", None, "token_mean"),
        ("sapo", None, "sequence_mean"),
        ("gmpo", (0.4, 0.4), "sequence_mean"),
        ("reinforce", None, "token_mean"),
    ],
)
def test_defaults_of_the_family(name: str, clip: tuple[float, float] | None, mode: str) -> None:
    objective = Objective(name)
    assert objective.clip_range == (clip or (float("inf"), float("inf")))
    assert Reduction(max_length=8 if name == "dr_grpo" else None).resolve(objective) == mode
    assert objective.per_sequence == (name in ("gspo", "gmpo"))


def test_one_clip_set_leaves_the_other_at_its_default() -> None:
    assert Objective("dapo", clip_low=0.1).clip_range == (0.1, 0.28)
    assert dataclasses.replace(Objective("grpo"), name="dapo").clip_range == (0.2, 0.28)


@pytest.mark.parametrize(("given", "nearest"), [("grppo", "grpo"), ("dapoo", "dapo"), ("reinforced", "reinforce")])
def test_an_unknown_name_gives_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        Objective(given)


UNUSED = [
    *[(n, {o: v}) for n in ("sapo", "reinforce", "cispo") for o, v in (("dual_clip", 2.0), ("delta", 2.0))],
    *[(n, {"clip_low": 0.1}) for n in ("sapo", "reinforce", "cispo")],
    *[(n, {"sapo_tau": (1.0, 2.0)}) for n in OBJECTIVES if n != "sapo"],
    *[(n, {"cispo_upper": 3.0}) for n in OBJECTIVES if n != "cispo"],
    *[(n, {"cispo_bound": "two_sided"}) for n in OBJECTIVES if n != "cispo"],
    ("grpo", {"kl_bias_corrected": True}),
    ("grpo", {"kl_bias_corrected": True, "kl_coef": 0.1, "kl": "k1"}),
]


@pytest.mark.parametrize(("name", "options"), UNUSED)
def test_an_option_that_is_not_used_raises(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}:"):
        Objective(name, **options)


def test_two_sided_cispo_does_not_use_the_upper_bound() -> None:
    with pytest.raises(ValueError, match=r"^cispo_upper:"):
        Objective("cispo", cispo_bound="two_sided", cispo_upper=3.0)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"clip_low": -0.1}),
        (ValueError, {"clip_high": float("nan")}),
        (TypeError, {"clip_high": "0.2"}),
        (ValueError, {"dual_clip": 1.0}),
        (ValueError, {"delta": 1.2}),
        (ValueError, {"kl_coef": -1.0}),
        (ValueError, {"kl": "k4"}),
        (ValueError, {"entropy_coef": float("inf")}),
        (TypeError, {"mismatch": "token"}),
        (ValueError, {"log_ratio_clamp": 0.0}),
        (ValueError, {"log_ratio_clamp": 100.0}),
        (TypeError, {"kl_bias_corrected": 1}),
    ],
)
def test_numbers_out_of_range_raise(error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{next(iter(options))}:"):
        Objective("grpo", **options)


@pytest.mark.parametrize(
    "options",
    [{"level": "tokens"}, {"action": "clip"}, {"lower": None, "upper": None}, {"lower": 3.0}, {"lower": -1.0}],
)
def test_mismatch_is_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{'upper' if options.get('lower') == 3.0 else next(iter(options))}"):
        Mismatch(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "mean"}, "mode"),
        ({"mode": "length_normalized"}, "max_length"),
        ({"mode": "token_mean", "max_length": 4}, "max_length"),
        ({"denominator": 0.0}, "denominator"),
        ({"max_length": 0}, "max_length"),
    ],
)
def test_reduction_is_checked(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}:"):
        Reduction(**options)


@pytest.mark.parametrize("option", ["name", "kl", "clip_low"])
def test_configuration_is_frozen(option: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Objective(), option, None)


@pytest.mark.parametrize(
    ("name", "reduction", "expected"),
    [
        ("grpo", Reduction(), 3),
        ("dapo", Reduction(), 9),
        ("dr_grpo", Reduction(max_length=10), 30),
        ("grpo", Reduction("token_sum"), 1),
        ("dapo", Reduction("sequence_mean"), 3),
        ("gspo", Reduction("length_normalized", max_length=7), 21),
    ],
)
def test_window_denominator(name: str, reduction: Reduction, expected: float) -> None:
    lengths = [4, 0, 3, 2]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    for given in (lengths, torch.tensor(lengths), mask, mask.float()):
        assert reduction.window_denominator(Objective(name), given) == expected
    parts = [reduction.window_denominator(Objective(name), part) for part in (lengths[:2], lengths[2:])]
    assert reduction.mode == "token_sum" or sum(parts) == expected


def test_window_denominator_of_nothing() -> None:
    assert Reduction().window_denominator(Objective(), []) == 0
    assert Reduction("token_mean").window_denominator(Objective(), torch.zeros(2, 0)) == 0

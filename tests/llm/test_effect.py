"""What is set and would do nothing is refused; what is refused does nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from unirl.errors import UniRLError
from unirl.llm.algorithms.batch_file import example_batch
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.diff import Outcome, outcome
from unirl.llm.algorithms.effect import check_effect, rules_of
from unirl.llm.algorithms.presets import PRESETS
from unirl.llm.algorithms.resolve import resolve
from unirl.llm.algorithms.terms import Algorithm

OTHERS: dict[str, Any] = {
    "baseline": "mean",
    "scale": "std_biased",
    "epsilon": 0.3,
    "singleton": "keep",
    "gae_lambda": 0.6,
    "bootstrap": True,
    "vtrace_value": "critic",
    "rho_clip": 0.7,
    "c_clip": 0.4,
    "whiten_epsilon": 0.1,
    "whiten_unbiased": False,
    "ratio": "behaviour",
    "clip_low": 0.03,
    "clip_high": 0.05,
    "dual_clip": 1.5,
    "tau_positive": 2.0,
    "tau_negative": 3.0,
    "log_ratio_clamp": 0.1,
    "norm_tokens": 7,
    "correction_level": "geometric",
    "correction_low": 0.9,
    "correction_high": 1.1,
    "mask_low": 0.95,
    "mask_high": 1.05,
    "kl": "k2",
    "kl_in": "reward",
    "kl_against": "behaviour",
    "kl_gradient": "ratio",
    "kl_clamp": 0.05,
    "critic": "detached",
    "value_coef": 0.9,
    "value_clip": 0.1,
    "entropy_schedule": "linear",
    "overlong_factor": 3.0,
    "overlong_capped": False,
}
SWITCHES = {
    "advantage",
    "discount",
    "whiten",
    "objective",
    "aggregation",
    "correction",
    "sequence_mask",
    "kl_coef",
    "entropy_coef",
    "mask_truncated",
    "overlong_share",
}
"""They have an effect whatever the others are."""


def is_refused(algorithm: Algorithm, name: str) -> bool:
    try:
        check_effect(algorithm, {name: OTHERS[name]})
    except UniRLError:
        return True
    return False


def result(algorithm: Algorithm) -> Outcome:
    batch = example_batch()
    at_half = algorithm.annealed(0.5)
    return outcome(replace(at_half, norm_tokens=algorithm.norm_tokens or 24), batch)


def test_every_field_is_either_always_in_force_or_refused_somewhere() -> None:
    assert set(OTHERS) | SWITCHES == set(rules_of(Algorithm))
    for name in OTHERS:
        refusing = [is_refused(preset.algorithm, name) for preset in PRESETS.values()]
        assert any(refusing), name


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_refused_changes_neither_loss_nor_gradient(preset: str) -> None:
    algorithm = PRESETS[preset].algorithm
    plain = result(algorithm)
    for name, other in OTHERS.items():
        if is_refused(algorithm, name):
            found = result(replace(algorithm, **{name: other}))
            assert found.loss == plain.loss, name
            assert torch.equal(found.gradient, plain.gradient), name


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"advantage": "gae", "scale": "std"}, "scale is std, and algorithm.advantage is gae"),
        ({"preset": "unirl:vtrace", "baseline": "mean"}, "algorithm.advantage is vtrace"),
        ({"scale": "none", "epsilon": 1e-3}, "epsilon is 0.001, and algorithm.scale is none"),
        ({"gae_lambda": 0.9}, "gae_lambda has an effect only with the advantages gae and vtrace"),
        ({"rho_clip": 2.0}, "algorithm.advantage is group"),
        ({"bootstrap": True}, "algorithm.bootstrap is True"),
        ({"preset": "unirl:vtrace", "bootstrap": True}, "algorithm.vtrace_value is group"),
        ({"value_coef": 0.1}, "algorithm.value_coef is 0.1"),
        ({"objective": "sapo", "clip_high": 0.3}, "algorithm.clip_high is 0.3, and"),
        ({"objective": "reinforce", "clip_low": 0.3}, "algorithm.objective is reinforce"),
        ({"objective": "cispo", "dual_clip": 3.0}, "with the objectives ppo and gspo"),
        ({"tau_positive": 2.0}, "with the objective sapo"),
        ({"correction": "none", "correction_high": 5.0}, "algorithm.correction is none"),
        ({"mask_low": 0.5}, "algorithm.sequence_mask is none"),
        ({"kl": "k2"}, "algorithm.kl is k2, and algorithm.kl_coef is 0"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_gradient": "score"}, "algorithm.kl_in is reward"),
        ({"norm_tokens": 9}, "algorithm.aggregation is token-mean"),
        ({"whiten_epsilon": 1e-3}, "algorithm.whiten is none"),
        ({"overlong_factor": 2.0}, "algorithm.overlong_share is 0"),
        ({"entropy_schedule": "linear"}, "algorithm.entropy_coef is 0"),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_without_effect_is_refused_with_what_it_needs(
    config: dict[str, Any], what: str
) -> None:
    with pytest.raises(UniRLError, match=what):
        resolve(AlgorithmConfig(**config))


@pytest.mark.parametrize(
    "config",
    [
        {"objective": "cispo", "dual_clip": 0.0},
        {"bootstrap": False, "value_clip": 0.0},
        {"preset": "unirl:vtrace", "ratio": "old"},
        {"kl_coef": 0.0, "kl": "k2", "kl_in": "reward"},
        {"overlong_share": 0.0, "overlong_factor": 2.0},
        {"preset": "unirl:vtrace", "vtrace_value": "critic", "bootstrap": True, "value_coef": 1.0},
        {"correction": "icepop", "correction_high": math.inf},
    ],
    ids=str,
)
def test_what_is_turned_off_in_words_is_no_mistake(config: dict[str, Any]) -> None:
    found = resolve(AlgorithmConfig(**config))
    assert all(getattr(found, name) == config[name] for name in config if name != "preset")


def test_the_bonus_for_entropy_falls_to_nothing_where_it_is_to() -> None:
    linear = resolve(AlgorithmConfig(entropy_coef=0.2, entropy_schedule="linear"))
    assert [linear.annealed(left).entropy_coef for left in (1.0, 0.25, 0.0)] == [0.2, 0.05, 0.0]
    assert resolve(AlgorithmConfig(entropy_coef=0.2)).annealed(0.0).entropy_coef == 0.2

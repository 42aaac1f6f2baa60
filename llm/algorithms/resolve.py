"""An AlgorithmConfig with every term decided, or why it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from unirl import config as configs
from unirl.errors import UniRLError
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.effect import check_effect
from unirl.llm.algorithms.presets import PRESETS
from unirl.llm.algorithms.terms import Algorithm

_OWN_DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # PPO's clip of 0.2 is no clip for GSPO, whose ratio is a mean, and makes CISPO something
        # else. Values of the papers.
        "objective": {
            "ppo": {"clip_low": 0.2, "clip_high": 0.28},
            "cispo": {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": 0.0},
            "gspo": {
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "dual_clip": 0.0,
                "aggregation": "seq-mean-token-mean",
            },
            "sapo": {"dual_clip": 0.0, "aggregation": "seq-mean-token-mean"},
            "dppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0},
            "reinforce": {"dual_clip": 0.0},
        },
        "correction": {
            "none": {},
            "tis": {"correction_low": 0.0, "correction_high": 2.0, "correction_level": "token"},
            "icepop": {"correction_low": 0.5, "correction_high": 5.0, "correction_level": "token"},
        },
        "advantage": {
            "group": {},
            "gae": {"whiten": "variance"},
            "vtrace": {"correction": "none", "sequence_mask": "none"},
        },
        "ratio": {"old": {}, "behaviour": {"correction": "none", "sequence_mask": "none"}},
        "sequence_mask": {
            "none": {},
            "geometric": {"mask_low": 0.99, "mask_high": 1.01},
            "product": {"mask_low": 0.5, "mask_high": 2.0},
        },
    }
)
"""Terms that go with a choice, where the choice is not the preset's own."""


def resolve(config: AlgorithmConfig, *, max_tokens: int = 0) -> Algorithm:
    """Every term decided: what the config sets, else what goes with a choice it changed, else the
    preset's. max_tokens: the most a completion may have; 0: not known yet, for descriptions only.

    Raises UniRLError when the preset is unknown, terms contradict each other, or something is set
    that has no effect.
    """
    if config.preset not in PRESETS:
        raise UniRLError(
            f'preset "{config.preset}" is unknown',
            f"there are {', '.join(PRESETS)}",
            configs.suggestion(config.preset, PRESETS) or "see unirl algorithms",
        )
    base = PRESETS[config.preset].algorithm
    names = [item.name for item in fields(config) if item.name != "preset"]
    chosen = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    followed: dict[str, Any] = {}
    for choice, defaults in _OWN_DEFAULTS.items():
        if choice in chosen and chosen[choice] != getattr(base, choice):
            followed |= defaults[chosen[choice]]
    terms = {k: v for k, v in (followed | chosen).items() if v != getattr(base, k)}
    name = config.preset + ("+" if terms else "")
    algorithm = replace(base, **terms, name=name)
    if algorithm.aggregation == "seq-mean-token-sum-norm" and not algorithm.norm_tokens:
        algorithm = replace(algorithm, norm_tokens=max_tokens)
    _check_terms(algorithm)
    check_effect(algorithm, chosen)
    return algorithm


def check_num_steps(algorithm: Algorithm, num_steps: int) -> None:
    """Raise UniRLError when a batch gives more steps of the optimiser than the objective is for."""
    if algorithm.objective == "reinforce" and num_steps > 1:
        raise UniRLError(
            f"algorithm.objective is reinforce and a batch gives {num_steps} steps",
            "it has no ratio to the policy before the batch, so its gradient is right at the first "
            f"alone: learner.epochs * learner.minibatches must be 1, it is {num_steps}",
            "set both to 1, or algorithm.objective to ppo",
        )


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    """Raise UniRLError when groups are too small for the algorithm's baseline."""
    if group_size < 2 and algorithm.needs_groups:
        raise UniRLError(
            f"group_size is {group_size}",
            f"{algorithm.name} takes a completion's advantage from its group "
            f"({algorithm.terms()['advantage']}): it needs at least 2",
            "raise group_size, or set algorithm.preset to openrlhf:reinforce++ or verl:ppo",
        )


def _check_terms(algorithm: Algorithm) -> None:
    """Raise UniRLError for terms that contradict each other."""
    rules = (
        (
            algorithm.ratio == "behaviour" and algorithm.weighs,
            "the ratio is taken to the engine already: a correction would count it twice",
            'set algorithm.correction and algorithm.sequence_mask to "none"',
        ),
        (
            algorithm.advantage == "vtrace" and algorithm.weighs,
            "V-trace's advantage carries its ratio: a correction would count it twice",
            'set algorithm.correction and algorithm.sequence_mask to "none"',
        ),
        (
            algorithm.advantage == "vtrace" and algorithm.ratio == "behaviour",
            "V-trace's advantage carries the ratio to the engine: the objective's must be to old",
            'set algorithm.ratio to "old"',
        ),
        (
            algorithm.baseline == "none" and algorithm.scale not in ("none", "batch_std"),
            "a group's deviation without its baseline makes equal rewards infinite",
            'set algorithm.baseline to "mean", or algorithm.scale to "none"',
        ),
        (
            algorithm.correction_low > algorithm.correction_high,
            f"correction_low is {algorithm.correction_low:g} and correction_high "
            f"{algorithm.correction_high:g}: low must not be above high",
            "swap them",
        ),
        (
            algorithm.mask_low > algorithm.mask_high,
            f"mask_low is {algorithm.mask_low:g} and mask_high {algorithm.mask_high:g}: low must "
            "not be above high",
            "swap them",
        ),
        (
            algorithm.kl_coef > 0
            and algorithm.kl_in == "loss"
            and algorithm.kl == "k1"
            and algorithm.kl_gradient == "direct",
            "k1 as a loss has no gradient towards the reference, only noise",
            "set algorithm.kl to k2, or algorithm.kl_in to reward",
        ),
        (
            algorithm.kl_in == "reward" and algorithm.kl_against == "behaviour",
            "KL in the reward is to the reference",
            "set algorithm.kl_in to loss",
        ),
    )
    for broken, rule, remedy in rules:
        if broken:
            raise UniRLError(f"algorithm {algorithm.name} contradicts itself", rule, remedy)

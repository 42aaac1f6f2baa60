"""An AlgorithmConfig with every term decided, or why it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unirl import config as configs
from unirl.errors import UniRLError
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.describe import described_terms
from unirl.llm.algorithms.effect import check_effect, rules_of
from unirl.llm.algorithms.presets import PRESETS
from unirl.llm.algorithms.terms import Algorithm


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
    chosen = config.chosen()
    followed: dict[str, Any] = {}
    for choice, rules in rules_of(config).items():
        if choice in chosen and chosen[choice] != getattr(base, choice):
            followed |= rules.brings.get(chosen[choice], {})
    terms = {k: v for k, v in (followed | chosen).items() if v != getattr(base, k)}
    algorithm = replace(base, **terms, changed=bool(terms))
    if algorithm.aggregation == "seq-mean-token-sum-norm" and not algorithm.norm_tokens:
        algorithm = replace(algorithm, norm_tokens=max_tokens)
    _check_terms(algorithm)
    check_effect(algorithm, chosen)
    return algorithm


def check_num_steps(algorithm: Algorithm, num_steps: int) -> None:
    if algorithm.objective == "reinforce" and num_steps > 1:
        raise UniRLError(
            f"algorithm.objective is reinforce and a batch gives {num_steps} steps",
            "it has no ratio to the policy before the batch, so its gradient is right at the first "
            f"alone: learner.epochs * learner.minibatches must be 1, it is {num_steps}",
            "set both to 1, or algorithm.objective to ppo",
        )


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    if group_size < 2 and algorithm.needs_groups:
        raise UniRLError(
            f"group_size is {group_size}",
            f"{algorithm.name} takes a completion's advantage from its group "
            f"({described_terms(algorithm)['advantage']}): it needs at least 2",
            "raise group_size, or set algorithm.preset to openrlhf:reinforce++ or verl:ppo",
        )


def _check_terms(algorithm: Algorithm) -> None:
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
            algorithm.mask_truncated and algorithm.bootstraps,
            "bootstrap values what follows completions that were cut off, and these are left out",
            "set one of algorithm.mask_truncated and algorithm.bootstrap to false",
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

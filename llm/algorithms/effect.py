"""Which fields of an algorithm count beside which others: one that is set in vain is a mistake, and
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unirl.errors import UniRLError
from unirl.llm.algorithms.terms import Algorithm


class _Rule(NamedTuple):
    fields: tuple[str, ...]
    counts: Callable[[Algorithm], bool]
    """Whether these fields have an effect."""
    where: str
    """The same in words, after "it counts"."""
    by: tuple[str, ...]
    """The fields that decide it."""


_OFF: Mapping[str, Any] = {"bootstrap": False, "dual_clip": 0.0, "value_clip": 0.0, "ratio": "old"}
"""Values that say of a field that it is off, which holds everywhere."""
_COEFFICIENTS = "kl_coef", "overlong_share"
"""Who sets one to 0 has turned off what belongs to it, and knows."""

_RULES = (
    _Rule(
        ("baseline", "scale", "epsilon", "singleton"),
        lambda a: a.advantage == "group",
        "with the advantage group",
        ("advantage",),
    ),
    _Rule(("epsilon",), lambda a: a.scale != "none", "beside a scale", ("scale",)),
    _Rule(("singleton",), lambda a: a.baseline != "none", "beside a baseline", ("baseline",)),
    _Rule(
        ("gae_lambda",),
        lambda a: a.advantage != "group",
        "with the advantages gae and vtrace",
        ("advantage",),
    ),
    _Rule(
        ("vtrace_value", "rho_clip", "c_clip"),
        lambda a: a.advantage == "vtrace",
        "with the advantage vtrace",
        ("advantage",),
    ),
    _Rule(
        ("bootstrap", "value_coef", "value_clip"),
        lambda a: a.needs_critic,
        "with a critic: with the advantage gae, or vtrace with vtrace_value critic",
        ("advantage", "vtrace_value"),
    ),
    _Rule(
        ("whiten_epsilon", "whiten_unbiased"),
        lambda a: a.whiten != "none",
        "where advantages are whitened",
        ("whiten",),
    ),
    _Rule(
        ("ratio", "log_ratio_clamp"),
        lambda a: a.objective != "reinforce",
        "with objectives that have a ratio",
        ("objective",),
    ),
    _Rule(
        ("clip_low", "clip_high"),
        lambda a: a.objective not in ("reinforce", "sapo"),
        "with the objectives ppo, cispo, gspo and dppo",
        ("objective",),
    ),
    _Rule(
        ("dual_clip",),
        lambda a: a.objective in ("ppo", "gspo"),
        "with the objectives ppo and gspo",
        ("objective",),
    ),
    _Rule(
        ("tau_positive", "tau_negative"),
        lambda a: a.objective == "sapo",
        "with the objective sapo",
        ("objective",),
    ),
    _Rule(
        ("norm_tokens",),
        lambda a: a.aggregation == "seq-mean-token-sum-norm",
        "with the aggregation seq-mean-token-sum-norm",
        ("aggregation",),
    ),
    _Rule(
        ("correction_level", "correction_low", "correction_high"),
        lambda a: a.correction != "none",
        "with a correction",
        ("correction",),
    ),
    _Rule(
        ("mask_low", "mask_high"),
        lambda a: a.sequence_mask != "none",
        "with a sequence_mask",
        ("sequence_mask",),
    ),
    _Rule(
        ("kl", "kl_in", "kl_against", "kl_gradient", "kl_clamp"),
        lambda a: a.kl_coef > 0,
        "where kl_coef is above 0",
        ("kl_coef",),
    ),
    _Rule(("kl_gradient",), lambda a: a.kl_in == "loss", "with KL in the loss", ("kl_in",)),
    _Rule(
        ("overlong_factor", "overlong_capped"),
        lambda a: a.overlong_share > 0,
        "where overlong_share is above 0",
        ("overlong_share",),
    ),
)


def check_effect(algorithm: Algorithm, chosen: Mapping[str, Any]) -> None:
    """Raise UniRLError for what was chosen, by field, and does nothing. A preset may hold such
    values: they wait for the choice that needs them.
    """
    for rule in _RULES:
        off = any(chosen.get(by) == 0 for by in rule.by if by in _COEFFICIENTS)
        if off or rule.counts(algorithm):
            continue
        for name in rule.fields:
            if name in chosen and chosen[name] != _OFF.get(name):
                now = ", ".join(
                    f"algorithm.{by} is {_plain(getattr(algorithm, by))}" for by in rule.by
                )
                raise UniRLError(
                    f"algorithm.{name} is {_plain(chosen[name])}, and {now}",
                    f"{name} has an effect only {rule.where}",
                    f"leave algorithm.{name} out, or set algorithm.{rule.by[0]} to what it needs",
                )


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

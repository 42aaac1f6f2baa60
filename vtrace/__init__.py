"""Return targets (V-trace, GAE), group-relative advantages, and the losses that consume them, for
unrolls and for packed tokens; needs nothing but torch.
"""

from unirl.vtrace.advantages import Reduce, vtrace_gae, whiten
from unirl.vtrace.groups import Baseline, Scale, Singleton, group_advantages, group_baseline
from unirl.vtrace.losses import (
    Loss,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_loss,
    kl_estimate,
    policy_gradient_loss,
    value_loss,
)
from unirl.vtrace.targets import GAE, VTrace, gae, vtrace_targets
from unirl.vtrace.token_advantages import (
    WhitenBy,
    token_gae,
    token_returns,
    token_rewards,
    token_vtrace,
    whiten_tokens,
)
from unirl.vtrace.token_corrections import Correction, Level, SequenceMask, correction_weights
from unirl.vtrace.token_kl import KlEstimate, KlGradient, token_kl
from unirl.vtrace.token_metrics import TokenMetrics, token_metrics
from unirl.vtrace.token_objectives import ObjectiveName, TokenObjective, token_objective
from unirl.vtrace.token_rows import TokenRows, per_completion, token_rows
from unirl.vtrace.tokens import Aggregation, aggregate, aggregate_denominator

__all__ = [
    "GAE",
    "Aggregation",
    "Baseline",
    "Correction",
    "KlEstimate",
    "KlGradient",
    "Level",
    "Loss",
    "ObjectiveName",
    "Reduce",
    "Scale",
    "SequenceMask",
    "Singleton",
    "TokenMetrics",
    "TokenObjective",
    "TokenRows",
    "VTrace",
    "WhitenBy",
    "aggregate",
    "aggregate_denominator",
    "clipped_policy_loss",
    "clipped_value_loss",
    "correction_weights",
    "entropy_loss",
    "gae",
    "group_advantages",
    "group_baseline",
    "kl_estimate",
    "per_completion",
    "policy_gradient_loss",
    "token_gae",
    "token_kl",
    "token_metrics",
    "token_objective",
    "token_returns",
    "token_rewards",
    "token_rows",
    "token_vtrace",
    "value_loss",
    "vtrace_gae",
    "vtrace_targets",
    "whiten",
    "whiten_tokens",
]

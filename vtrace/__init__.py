"""Return targets (V-trace, GAE) and the losses that consume them; needs nothing but torch."""

from unirl.vtrace.advantages import vtrace_gae, whiten
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

__all__ = [
    "GAE",
    "Loss",
    "VTrace",
    "clipped_policy_loss",
    "clipped_value_loss",
    "entropy_loss",
    "gae",
    "kl_estimate",
    "policy_gradient_loss",
    "value_loss",
    "vtrace_gae",
    "vtrace_targets",
    "whiten",
]

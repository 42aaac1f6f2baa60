"""Return targets (V-trace, GAE) and the losses that consume them; needs nothing but torch."""

from unirl.vtrace.losses import Loss, entropy_loss, policy_gradient_loss, value_loss
from unirl.vtrace.targets import GAE, VTrace, gae, vtrace_targets

__all__ = [
    "GAE",
    "Loss",
    "VTrace",
    "entropy_loss",
    "gae",
    "policy_gradient_loss",
    "value_loss",
    "vtrace_targets",
]

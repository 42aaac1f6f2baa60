"""Policies: networks over observation trees, action distributions and running normalisation."""

from __future__ import annotations

from unirl.policy.config import PolicyConfig
from unirl.policy.normalize import ReturnNorm, RunningNorm
from unirl.policy.policy import ActResult, Policy, Unroll
from unirl.policy.recurrent import zero_state

__all__ = [
    "ActResult",
    "Policy",
    "PolicyConfig",
    "ReturnNorm",
    "RunningNorm",
    "Unroll",
    "zero_state",
]

"""Which environments a policy with memory can play in: those that show it every observation."""

from __future__ import annotations

from unirl.envs.vector import VectorEnv
from unirl.errors import UniRLError
from unirl.policy import PolicyConfig


def check_memory(env: VectorEnv, policy: PolicyConfig, env_id: str) -> None:
    """UniRLError for a recurrent policy where first observations are hidden, as by an engine that
    resets within the step: neither actor nor learner could remember them."""
    if policy.core == "none" or not env.hides_first_obs:
        return
    raise UniRLError(
        f'policy.core {policy.core!r} cannot play env "{env_id}" on this engine',
        "a policy with memory must see each episode's first observation,"
        " which an engine with autoreset mode SameStep hides",
        'set policy.core to "none", use env.engine "sync", or an autoreset mode of NextStep',
    )

"""The shared-memory sampler's settings: how many environments there are, who steps them and who
decides for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.actors.vector import ActorConfig
from unirl.config.rules import check_at_least
from unirl.core.queue import QueueConfig
from unirl.device import check_device
from unirl.errors import UniRLError
from unirl.handshake.layout import HandshakeLayout


@dataclass(frozen=True)
class SamplerConfig:
    """How many environments there are, who steps them and who decides for them."""

    num_workers: int = field(default=2, metadata={"common": True})
    """Environment workers: processes that step environments and hold no policy. More than cores
    only helps where environments wait.
    """
    num_groups: int = 2
    """Groups of each worker: one steps while another waits for its actions. 1: worker and policy
    take turns; more than 2 helps where one group is much slower than the others.
    """
    num_envs: int = field(default=16, metadata={"common": True})
    """Environments of each group, in one slot together. More: cheaper steps, larger slots."""
    unroll_length: int = field(default=32, metadata={"common": True})
    """Steps per environment in one slot. More: longer credit assignment, fewer updates."""
    worker_cpus: float = 1.0
    """CPUs that runner ray reserves for an environment worker, beside those of the policy workers.
    Less: several share a core, as is right where environments wait.
    """
    num_policy_workers: int = 1
    """Processes that hold a policy copy and decide. More helps only where one cannot keep up."""
    batch_rows: int = 0
    """Environments of one forward pass at most, in whole groups. 0: all that wait. With
    num_envs every group is decided for on its own, and samples are bit for bit those of the inline
    runner.
    """
    batch_wait_ms: float = 0.0
    """How long the first group that is due waits for one of every other worker; about the time that
    stepping a group takes brings workers into step, and then nobody waits. More: larger batches,
    more latency where steps take unequally long.
    """
    group_threads: bool = False
    """Step the groups of a worker side by side, in threads: for environments that wait or compute
    without the interpreter's lock, so that a slow group holds up no other.
    """
    agent_policies: tuple[int, ...] = ()
    """Which policy each agent of a multi-agent environment acts with, in the environment's order,
    counted from 0: (0, 1) for two players that learn apart. Each policy has a queue and a learner
    of its own. Empty: one policy for all.
    """
    device: str = "cpu"
    """Where policy workers act: cpu, cuda or cuda:N. The inline runner acts on the CPU."""

    def __post_init__(self) -> None:
        check_at_least(1, "sampler", self, "num_workers", "num_groups", "num_envs")
        check_at_least(1, "sampler", self, "unroll_length", "num_policy_workers")
        check_at_least(0, "sampler", self, "batch_wait_ms", "worker_cpus")
        if self.num_policy_workers > self.num_workers:
            raise UniRLError(
                f"{self.num_policy_workers} policy workers share {self.num_workers} workers",
                "sampler.num_policy_workers <= sampler.num_workers must hold",
                f"set sampler.num_policy_workers to {self.num_workers}, or use more workers",
            )
        if self.batch_rows and self.batch_rows < self.num_envs:
            raise UniRLError(
                f"sampler.batch_rows is {self.batch_rows} and sampler.num_envs {self.num_envs}",
                "batch_rows >= num_envs must hold: a group is decided for as a whole",
                f"set sampler.batch_rows to {self.num_envs}, or to 0",
            )
        agents = self.agent_policies
        if agents and set(agents) != set(range(max(agents) + 1)):
            raise UniRLError(
                f"sampler.agent_policies is {list(agents)}",
                "every policy from 0 on must have an agent",
                "count policies from 0 without a gap: [0, 1]",
            )
        if agents and self.num_envs % len(agents):
            raise UniRLError(
                f"{self.num_envs} rows do not split into environments of {len(agents)} agents",
                "sampler.num_envs % len(sampler.agent_policies) must be 0: each agent is a row",
                f"set sampler.num_envs to {-(-self.num_envs // len(agents)) * len(agents)}",
            )
        check_device("sampler.device", self.device)

    @property
    def total_groups(self) -> int:
        """Groups of all workers: as many slots are being filled at a time."""
        return self.num_workers * self.num_groups

    @property
    def num_policies(self) -> int:
        """Policies that learn, each with a queue and a learner."""
        return max(self.agent_policies, default=0) + 1

    def rows_of(self, policy: int) -> list[int]:
        agents = self.agent_policies or (0,)
        return [row for row in range(self.num_envs) if agents[row % len(agents)] == policy]

    def layout(self) -> HandshakeLayout:
        return HandshakeLayout(
            self.num_workers, self.num_groups, self.num_policy_workers, self.num_policies
        )

    def shape(self, policy: int) -> ActorConfig:
        """The size of one slot of a policy: its rows of a group, for unroll_spec."""
        rows = len(self.rows_of(policy))
        return ActorConfig(
            num_actors=self.num_policy_workers, num_envs=rows, unroll_length=self.unroll_length
        )


def check_slots(sampler: SamplerConfig, queue: QueueConfig) -> None:
    """Raise UniRLError unless there is a slot for every group: else some never step."""
    if sampler.total_groups <= queue.num_slots:
        return
    enough = -(-sampler.total_groups // queue.batch_size) - 1
    raise UniRLError(
        f"{sampler.total_groups} groups of environments share {queue.num_slots} slots",
        "sampler.num_workers * sampler.num_groups <= (max_staleness + 1) * batch_size must hold",
        f"set queue.max_staleness to {enough}, or use fewer groups",
    )

"""Settings of all learners over unrolls, and the rules that they must satisfy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unirl.config.rules import check_at_least, check_positive
from unirl.core.schedule import ScheduleName, check_name
from unirl.device import check_device
from unirl.errors import UniRLError
from unirl.learners.optimizer import OptimizerConfig


@dataclass(frozen=True)
class UnrollLearnerConfig:
    """The loss, and how often each batch is used."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ranks: int = 1
    """Processes of this machine that learn together, each from its part of every batch; episodes
    that are reported are those of the first part. More: faster, where there are GPUs or cores.
    """
    gamma: float = field(default=0.99, metadata={"common": True})
    """Discount per step. More: farther sight, noisier targets."""
    lambda_: float = 1.0
    """Shrinks V-trace's traces. Less: less variance, more bias. 1 is the paper's."""
    rho_clip: float = field(default=1.0, metadata={"infinite": True})
    """Bound on the importance ratio of one step: decides which policy's value is learned."""
    pg_rho_clip: float | None = field(default=None, metadata={"infinite": True})
    """Bound on the ratio that weights the policy gradient (TorchBeast's and rlax's clip_pg_rho).
    none: rho_clip. More: samples of older policies teach with less bias and more noise.
    """
    c_clip: float = field(default=1.0, metadata={"infinite": True})
    """Bound on the ratios that carry corrections back in time."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = field(default=0.01, metadata={"common": True})
    """Weight of the entropy bonus. More: explores longer."""
    entropy_schedule: ScheduleName = "constant"
    """linear, cosine: falls to zero at the end of the run (run.anneal_over, run.anneal_from).
    module:function of your own: as with learner.optimizer.lr_schedule.
    """
    reward_clip: float | None = None
    """Rewards are clamped to +- this before learning (1 for Atari, as in Nature DQN); logged
    returns stay raw.
    """
    reward_scale: float = 1.0
    """Rewards are multiplied by this before all else. Less: smaller targets, where returns are
    large.
    """
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    epochs: int = field(default=1, metadata={"common": True})
    """Passes over each batch. More: fewer samples, more compute."""
    minibatches: int = field(default=1, metadata={"common": True})
    """How many minibatches a batch is split into: along its environments, with PPO's objective and
    no memory into steps drawn from everywhere. More: more and noisier updates per batch.
    """
    shuffle: Literal["pass", "batch"] = "pass"
    """When minibatches are drawn: for each pass over a batch, or once per batch, which is cheaper.
    """
    stop_kl: float | None = None
    """No further pass over a batch once a pass found the policy this far (in nats,
    losses/approx_kl) from where it began. Less: steadier, fewer steps. Waits for the device after
    each pass.
    """
    truncation: Literal["final", "previous"] = "final"
    """What an episode that a limit cut off is continued with, where a simulator resets within the
    step: the value of its final observation, or that of the one before, which some libraries use
    and which is wrong by one step.
    """
    max_nan_states: int = 1000
    """How many environments may be reset because their state was not finite before the run stops.
    """
    device: str = "cpu"
    """Where the learner computes: cpu or cuda."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1 or not 0 <= self.lambda_ <= 1:
            raise UniRLError(
                f"learner.gamma is {self.gamma} and learner.lambda_ {self.lambda_}",
                "both must lie in [0, 1]",
                "0.99 and 1 are usual",
            )
        check_name(self.entropy_schedule, "learner.entropy_schedule")
        check_at_least(0, "learner", self, "rho_clip", "pg_rho_clip", "c_clip")
        check_at_least(0, "learner", self, "value_coef", "entropy_coef")
        check_at_least(1, "learner", self, "ranks", "epochs", "minibatches")
        check_positive("learner.reward_clip", self.reward_clip, "1 is usual for Atari")
        check_positive("learner.reward_scale", self.reward_scale, "1 leaves rewards as they are")
        check_positive("learner.stop_kl", self.stop_kl, "0.02 is usual; leave it out for no limit")
        if self.stop_kl is not None and self.epochs == 1:
            raise UniRLError(
                f"learner.stop_kl is {self.stop_kl} and has no effect",
                "it leaves out further passes over a batch, and learner.epochs is 1",
                "leave it out, or set learner.epochs to 2 or more",
            )
        check_device("learner.device", self.device)
        if self.optimizer.lr_schedule == "adaptive" and self.epochs * self.minibatches == 1:
            raise UniRLError(
                "learner.optimizer.lr_schedule is adaptive and a batch gives one step",
                "how far the policy moved is seen from the second step on: "
                "learner.epochs * learner.minibatches >= 2 must hold, it is 1",
                "set learner.epochs to 2 or more, or lr_schedule to linear",
            )


TUNABLE = (
    "learner.optimizer.lr",
    "learner.optimizer.max_grad_norm",
    "learner.entropy_coef",
    "learner.value_coef",
    "learner.lambda_",
    "learner.policy_clip",
    "learner.rho_clip",
    "learner.c_clip",
)
"""Settings that may change while a learner trains: they scale a loss or a step, and nothing that
is kept from update to update, or that actors know, depends on them.
"""


def tuned(config: UnrollLearnerConfig, settings: Mapping[str, float]) -> UnrollLearnerConfig:
    """With other values of some of TUNABLE."""
    own: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for key, value in settings.items():
        table, _, name = key.rpartition(".")
        (optimizer if table == "learner.optimizer" else own)[name] = value
    return replace(config, **own, optimizer=replace(config.optimizer, **optimizer))


def check_minibatches(
    minibatches: int,
    num_envs: int,
    num_steps: int | None = None,
    *,
    what: str = "actor.num_envs * queue.batch_size",
    length: str = "actor.unroll_length",
) -> None:
    """Raise UniRLError unless a batch of so many environments splits evenly. num_steps: of each, if
    minibatches may hold any of them and not only whole unrolls. what, length: the settings that
    both numbers come from.
    """
    pieces, kind = num_envs, "environments"
    if num_steps is not None:
        pieces, kind, what = num_envs * num_steps, "steps", f"{what} * {length}"
    if pieces % minibatches:
        nearest = min(
            (d for d in range(1, pieces + 1) if pieces % d == 0),
            key=lambda divisor: abs(divisor - minibatches),
        )
        raise UniRLError(
            f"batch of {pieces} {kind} does not split into {minibatches} minibatches",
            f"({what}) % learner.minibatches must be 0, it is {pieces % minibatches}",
            f"try learner.minibatches {nearest}",
        )

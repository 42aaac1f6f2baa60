"""The sections `learner` and `critic` of a recipe for language models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unirl.config.rules import check_at_least, check_positive
from unirl.device import check_device
from unirl.errors import UniRLError
from unirl.learners.optimizer import ADAPTIVE_BOUNDS, OptimizerConfig


@dataclass(frozen=True)
class LlmLearnerConfig:
    """How a batch of groups is learned from."""

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            lr=1e-6, max_grad_norm=1.0, epsilon=1e-8, beta2=0.99
        )
    )
    ranks: int = 1
    """Processes of this machine that learn together, each from its part of every batch; with
    model.shard each holds a part of the model, too. More: faster, where there are GPUs or cores.
    """
    epochs: int = 1
    """Passes over each batch. More: more from each completion, further from the policy that wrote
    it.
    """
    minibatches: int = 1
    """Steps of the optimiser per pass, each on some of the groups. More: more progress per
    batch, noisier steps.
    """
    micro_tokens: int = 8192
    """Tokens computed at a time; the result does not depend on it. More: faster, more memory."""
    share_prompt: bool = True
    """Compute the prompt of a group once for all its completions. False: for comparison."""
    entropy: bool = True
    """Report the entropy of the policy; it costs one more pass over the logits."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""

    def __post_init__(self) -> None:
        check_at_least(1, "learner", self, "ranks", "epochs", "minibatches", "micro_tokens")
        check_device("learner.device", self.device, may_be_auto=True)
        if self.optimizer.lr_schedule == "adaptive":
            self._check_adaptive()

    def _check_adaptive(self) -> None:
        if self.epochs * self.minibatches == 1:
            raise UniRLError(
                "learner.optimizer.lr_schedule is adaptive and a batch gives one step",
                "how far the policy moved is seen from the second step on: "
                "learner.epochs * learner.minibatches >= 2 must hold, it is 1",
                "set learner.epochs to 2 or more, or lr_schedule to constant or linear",
            )
        low, high = ADAPTIVE_BOUNDS
        if not low <= self.optimizer.lr <= high:
            raise UniRLError(
                f"learner.optimizer.lr is {self.optimizer.lr:g} and lr_schedule is adaptive",
                f"an adaptive step size stays within {low:g} .. {high:g}, where it must begin",
                f"set learner.optimizer.lr to {low:g} or more, or lr_schedule to constant",
            )


@dataclass(frozen=True)
class CriticConfig:
    """The critic's own model, where algorithm.critic is model."""

    path: str = ""
    """A folder or hub id, as model.path; it must read the same tokens. "": as model.path."""
    lr: float = 1e-5
    """Step size of its optimiser, which is otherwise as learner.optimizer has it. More: it follows
    the policy sooner.
    """

    def __post_init__(self) -> None:
        check_positive("critic.lr", self.lr, "1e-5 is usual")

    def optimizer(self, policy: OptimizerConfig) -> OptimizerConfig:
        """Its optimiser; it has no step that moves a policy too far."""
        schedule = "constant" if policy.lr_schedule == "adaptive" else policy.lr_schedule
        return replace(policy, lr=self.lr, lr_schedule=schedule)

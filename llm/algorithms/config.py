"""The section `algorithm` of a recipe for language models.

A preset decides every term; what is set here besides replaces its terms one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from unirl.errors import UniRLError

_AT_LEAST: dict[str, float] = {
    "epsilon": 0.0,
    "whiten_epsilon": 0.0,
    "rho_clip": 0.0,
    "c_clip": 0.0,
    "clip_low": 0.0,
    "clip_high": 0.0,
    "dual_clip": 0.0,
    "log_ratio_clamp": 0.0,
    "norm_tokens": 0,
    "correction_low": 0.0,
    "correction_high": 0.0,
    "mask_low": 0.0,
    "mask_high": 0.0,
    "kl_coef": 0.0,
    "kl_clamp": 0.0,
    "value_coef": 0.0,
    "value_clip": 0.0,
    "entropy_coef": 0.0,
    "overlong_factor": 0.0,
}


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is learned from rewards. A field that is not set (none) is as the preset has it; when
    the objective or the correction is changed, its bounds are those of the new one. What is set and
    would have no effect is refused.
    """

    preset: str = "unirl:grpo"
    """Whose conventions apply. `unirl algorithms` lists them with their terms."""
    advantage: Literal["group", "gae", "vtrace"] | None = None
    """group: from the rewards of a group. gae: with a critic, per token. vtrace: IMPALA's kernel
    with tokens as steps.
    """
    baseline: Literal["none", "mean", "leave_one_out"] | None = None
    """group: what is taken off a reward. leave_one_out: the mean of the others, without bias."""
    scale: Literal["none", "std", "std_biased", "leave_one_out_std", "batch_std"] | None = None
    """group: what divides then. std lets prompts of nearly equal rewards weigh more."""
    epsilon: float | None = None
    """Added to that. Larger: groups of nearly equal rewards count less."""
    singleton: Literal["zero", "keep"] | None = None
    """Advantage of a completion alone in its group: 0, or its reward."""
    discount: float | None = None
    """Per token. Below 1, early tokens earn less of a reward at the end."""
    gae_lambda: float | None = None
    """gae, vtrace: 1 trusts rewards alone, less trusts the critic more: less variance,
    more bias.
    """
    bootstrap: bool | None = None
    """gae, vtrace with a critic: a completion that was cut off is worth what the critic says of it,
    instead of nothing more.
    """
    vtrace_value: Literal["group", "critic"] | None = None
    """vtrace: what stands for the value: the mean reward of the others, or a critic."""
    rho_clip: float | None = None
    """vtrace: bound of a token's ratio. Larger: less bias from old samples, more variance."""
    c_clip: float | None = None
    """vtrace: bound of the ratios along the trace. Larger: corrections reach further back."""
    whiten: Literal["none", "variance", "floor", "std"] | None = None
    """Centre and scale advantages over all tokens of the batch; where whiten_epsilon goes: added to
    the variance, the floor of it, or added to the deviation.
    """
    whiten_epsilon: float | None = None
    """Larger: small advantages are amplified less."""
    whiten_unbiased: bool | None = None
    """Variance over n - 1 instead of n tokens."""
    objective: Literal["ppo", "cispo", "gspo", "sapo", "dppo", "reinforce"] | None = None
    """How far a token's probability may move at once. reinforce: no bound; for one update per
    batch.
    """
    ratio: Literal["old", "behaviour"] | None = None
    """To whom the ratio is taken: the learner before the update, or the engine that drew."""
    clip_low: float | None = None
    """How far a ratio may fall below 1 (dppo: a probability fall). Larger: bigger steps away."""
    clip_high: float | None = None
    """How far it may rise. Larger than clip_low: rare tokens can grow."""
    dual_clip: float | None = None
    """ppo, gspo: with negative advantage a ratio counts as at most this; 0 is off, else above 1."""
    tau_positive: float | None = None
    """sapo: how soon a ratio stops counting for positive advantages. Larger: sooner."""
    tau_negative: float | None = None
    """sapo: the same for negative ones."""
    log_ratio_clamp: float | None = None
    """A log-ratio counts as at most this, for no number may overflow."""
    aggregation: (
        Literal[
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
        ]
        | None
    ) = None
    """What all tokens' losses become. seq-mean-token-mean: a token of a long completion counts
    less. -norm: the sum over norm_tokens, per completion.
    """
    norm_tokens: int | None = None
    """seq-mean-token-sum-norm: the constant. 0: the most tokens a completion may have."""
    correction: Literal["none", "tis", "icepop"] | None = None
    """How tokens are weighed for the engine's other probabilities. tis: the ratio, bounded. icepop:
    0 outside the bounds.
    """
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """Whose ratio. sequence, the product over all tokens, is of no use for long completions."""
    correction_low: float | None = None
    """Lower bound. tis: smaller weights are raised to it, which lets unlikely tokens in."""
    correction_high: float | None = None
    """Upper bound. Larger: less bias, more variance."""
    sequence_mask: Literal["none", "geometric", "product"] | None = None
    """Which ratio of a completion must be within mask_low .. mask_high for it to count."""
    mask_low: float | None = None
    """Larger: more completions are rejected."""
    mask_high: float | None = None
    """Larger: fewer completions are rejected."""
    kl_coef: float | None = None
    """How strongly the policy is held to the reference. 0: not, and no reference is needed."""
    kl: Literal["k1", "k2", "k3"] | None = None
    """The estimate: k1 in the reward; in the loss k2, or k3 with a gradient of its own."""
    kl_in: Literal["loss", "reward"] | None = None
    """Where it is: a loss of its own, or less reward per token."""
    kl_against: Literal["reference", "behaviour"] | None = None
    """To which model: the reference, or the engine that drew (no reference is needed)."""
    kl_gradient: Literal["direct", "k2", "score", "ratio"] | None = None
    """In the loss: direct is what the estimate's formula gives, which for k3 is the gradient of the
    other KL; k2 that of k2; score adds the token's own probability, ratio that and a weight for
    tokens that the engine drew with another one, up to 5.
    """
    kl_clamp: float | None = None
    """An estimate counts as at most this, and has no gradient beyond."""
    value_coef: float | None = None
    """With a critic: weight of its loss."""
    value_clip: float | None = None
    """With a critic: how far a value may move in one batch and still learn. 0: no bound."""
    entropy_coef: float | None = None
    """Weight of the bonus for entropy. More: the policy stays random for longer."""
    overlong_share: float | None = None
    """Completions that reach into this last share of max_tokens lose reward (DAPO). 0: none do."""
    overlong_factor: float | None = None
    """What one loses that fills it."""
    overlong_capped: bool | None = None
    """Whether more than that is never lost (a completion can be longer than max_tokens when tools
    write too).
    """

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise _wrong(name, value, f"must be >= {least:g}", "leave it out for the preset's")
        for name in ("discount", "gae_lambda", "overlong_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise _wrong(name, value, "must be within 0 .. 1", "leave it out for the preset's")
        for name in ("tau_positive", "tau_negative"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise _wrong(name, value, "must be above 0 and finite", "SAPO takes 1 and 1.05")
        if self.dual_clip is not None and 0 < self.dual_clip <= 1:
            raise _wrong("dual_clip", self.dual_clip, "must be 0 (off) or above 1", "3 is usual")


def _wrong(name: str, value: object, rule: str, remedy: str) -> UniRLError:
    return UniRLError(f"algorithm.{name} is {value}", f"it {rule}", remedy)

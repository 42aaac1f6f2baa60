"""An algorithm of LLM post-training: each term of the loss is declared here, once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from unirl.core.schedule import NAMES, ScheduleName, is_schedule
from unirl.llm.algorithms.effect import Bound, Condition, term
from unirl.vtrace import (
    Aggregation,
    Baseline,
    Correction,
    KlEstimate,
    KlGradient,
    Level,
    ObjectiveName,
    Scale,
    SequenceMask,
    Singleton,
)

AdvantageKind: TypeAlias = Literal["group", "gae", "vtrace"]
CriticKind: TypeAlias = Literal["head", "detached", "model"]
Whiten: TypeAlias = Literal["none", "variance", "floor", "std"]

NOT_NEGATIVE = Bound(lambda value: value >= 0, "must be >= 0")
SHARE = Bound(lambda value: 0 <= value <= 1, "must be within 0 .. 1")
POSITIVE = Bound(
    lambda value: 0 < value < math.inf, "must be above 0 and finite", "SAPO takes 1 and 1.05"
)
OFF_OR_ABOVE_ONE = Bound(
    lambda value: value == 0 or value > 1, "must be 0 (off) or above 1", "3 is usual"
)

SCHEDULE = Bound(is_schedule, f"must be {', '.join(NAMES)}, or module:function of your own")

WITH_GROUPS = Condition(
    lambda a: a.advantage == "group", "with the advantage group", ("advantage",)
)
WITH_SCALE = Condition(lambda a: a.scale != "none", "beside a scale", ("scale",))
WITH_BASELINE = Condition(lambda a: a.baseline != "none", "beside a baseline", ("baseline",))
WITH_TRACES = Condition(
    lambda a: a.advantage != "group", "with the advantages gae and vtrace", ("advantage",)
)
WITH_VTRACE = Condition(
    lambda a: a.advantage == "vtrace", "with the advantage vtrace", ("advantage",)
)
WITH_CRITIC = Condition(
    lambda a: a.needs_critic,
    "with a critic: with the advantage gae, or vtrace with vtrace_value critic",
    ("advantage", "vtrace_value"),
)
WITH_WHITENING = Condition(
    lambda a: a.whiten != "none", "where advantages are whitened", ("whiten",)
)
WITH_RATIO = Condition(
    lambda a: a.objective != "reinforce", "with objectives that have a ratio", ("objective",)
)
WITH_CLIP = Condition(
    lambda a: a.objective not in ("reinforce", "sapo"),
    "with the objectives ppo, cispo, gspo and dppo",
    ("objective",),
)
WITH_DUAL_CLIP = Condition(
    lambda a: a.objective in ("ppo", "gspo"), "with the objectives ppo and gspo", ("objective",)
)
WITH_SAPO = Condition(lambda a: a.objective == "sapo", "with the objective sapo", ("objective",))
WITH_CONSTANT = Condition(
    lambda a: a.aggregation == "seq-mean-token-sum-norm",
    "with the aggregation seq-mean-token-sum-norm",
    ("aggregation",),
)
WITH_CORRECTION = Condition(lambda a: a.correction != "none", "with a correction", ("correction",))
WITH_MASK = Condition(
    lambda a: a.sequence_mask != "none", "with a sequence_mask", ("sequence_mask",)
)
WITH_KL = Condition(lambda a: a.kl_coef > 0, "where kl_coef is above 0", ("kl_coef",))
WITH_KL_LOSS = Condition(lambda a: a.kl_in == "loss", "with KL in the loss", ("kl_in",))
WITH_ENTROPY = Condition(
    lambda a: a.entropy_coef > 0, "where entropy_coef is above 0", ("entropy_coef",)
)
WITH_OVERLONG = Condition(
    lambda a: a.overlong_share > 0, "where overlong_share is above 0", ("overlong_share",)
)

_UNWEIGHED = {"correction": "none", "sequence_mask": "none"}
_OF_ADVANTAGE = {"gae": {"whiten": "variance"}, "vtrace": _UNWEIGHED}
# PPO's clip of 0.2 is no clip for GSPO, whose ratio is a mean, and makes CISPO something else.
# Values of the papers.
_OF_OBJECTIVE: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": 0.0},
    "gspo": {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": 0.0,
        "aggregation": "seq-mean-token-mean",
    },
    "sapo": {"dual_clip": 0.0, "aggregation": "seq-mean-token-mean"},
    "dppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0},
    "reinforce": {"dual_clip": 0.0},
}
_OF_CORRECTION: dict[str, dict[str, Any]] = {
    "tis": {"correction_low": 0.0, "correction_high": 2.0, "correction_level": "token"},
    "icepop": {"correction_low": 0.5, "correction_high": 5.0, "correction_level": "token"},
}
_OF_MASK = {
    "geometric": {"mask_low": 0.99, "mask_high": 1.01},
    "product": {"mask_low": 0.5, "mask_high": 2.0},
}


@dataclass(frozen=True)
class Terms:
    """Every term of the loss. The defaults are the plainest: REINFORCE with the group's mean taken
    off.
    """

    preset: str = ""
    """Whose conventions apply. `unirl algorithms` lists them with their terms."""
    advantage: AdvantageKind = term("group", brings=_OF_ADVANTAGE)
    """group: from the rewards of a group. gae: with a critic, per token. vtrace: IMPALA's kernel
    with tokens as steps.
    """
    baseline: Baseline = term("mean", WITH_GROUPS)
    """group: what is taken off a reward. leave_one_out: the mean of the others, without bias."""
    scale: Scale = term("none", WITH_GROUPS)
    """group: what divides then. std lets prompts of nearly equal rewards weigh more."""
    epsilon: float = term(1e-6, WITH_GROUPS, WITH_SCALE, bound=NOT_NEGATIVE)
    """Added to that. Larger: groups of nearly equal rewards count less."""
    singleton: Singleton = term("zero", WITH_GROUPS, WITH_BASELINE)
    """Advantage of a completion alone in its group: 0, or its reward."""
    discount: float = term(1.0, bound=SHARE)
    """Per token. Below 1, early tokens earn less of a reward at the end."""
    gae_lambda: float = term(1.0, WITH_TRACES, bound=SHARE)
    """gae, vtrace: 1 trusts rewards alone, less trusts the critic more: less variance,
    more bias.
    """
    bootstrap: bool = term(False, WITH_CRITIC, off=False)
    """gae, vtrace with a critic: a completion that was cut off is worth what the critic says of it,
    instead of nothing more.
    """
    vtrace_value: Literal["group", "critic"] = term("group", WITH_VTRACE)
    """vtrace: what stands for the value: the mean reward of the others, or a critic."""
    rho_clip: float = term(1.0, WITH_VTRACE, bound=NOT_NEGATIVE, infinite=True)
    """vtrace: bound of a token's ratio. Larger: less bias from old samples, more variance."""
    c_clip: float = term(1.0, WITH_VTRACE, bound=NOT_NEGATIVE, infinite=True)
    """vtrace: bound of the ratios along the trace. Larger: corrections reach further back."""
    whiten: Whiten = term("none")
    """Centre and scale advantages over all tokens of the batch; where whiten_epsilon goes: added to
    the variance, the floor of it, or added to the deviation.
    """
    whiten_epsilon: float = term(1e-8, WITH_WHITENING, bound=NOT_NEGATIVE)
    """Larger: small advantages are amplified less."""
    whiten_unbiased: bool = term(True, WITH_WHITENING)
    """Variance over n - 1 instead of n tokens."""
    objective: ObjectiveName = term("ppo", brings=_OF_OBJECTIVE)
    """How far a token's probability may move at once. reinforce: no bound; for one update per
    batch.
    """
    ratio: Literal["old", "behaviour"] = term(
        "old", WITH_RATIO, off="old", brings={"behaviour": _UNWEIGHED}
    )
    """To whom the ratio is taken: the learner before the update, or the engine that drew."""
    clip_low: float = term(0.2, WITH_CLIP, bound=NOT_NEGATIVE, infinite=True)
    """How far a ratio may fall below 1 (dppo: a probability fall). Larger: bigger steps away."""
    clip_high: float = term(0.2, WITH_CLIP, bound=NOT_NEGATIVE, infinite=True)
    """How far it may rise. Larger than clip_low: rare tokens can grow."""
    dual_clip: float = term(0.0, WITH_DUAL_CLIP, bound=OFF_OR_ABOVE_ONE, off=0.0)
    """ppo, gspo: with negative advantage a ratio counts as at most this; 0 is off, else above 1."""
    tau_positive: float = term(1.0, WITH_SAPO, bound=POSITIVE)
    """sapo: how soon a ratio stops counting for positive advantages. Larger: sooner."""
    tau_negative: float = term(1.05, WITH_SAPO, bound=POSITIVE)
    """sapo: the same for negative ones."""
    log_ratio_clamp: float = term(20.0, WITH_RATIO, bound=NOT_NEGATIVE, infinite=True)
    """A log-ratio counts as at most this, for no number may overflow."""
    aggregation: Aggregation = term("token-mean")
    """What all tokens' losses become. seq-mean-token-mean: a token of a long completion counts
    less. -norm: the sum over norm_tokens, per completion.
    """
    norm_tokens: int = term(0, WITH_CONSTANT, bound=NOT_NEGATIVE)
    """seq-mean-token-sum-norm: the constant. 0: the most tokens a completion may have."""
    correction: Correction = term("none", brings=_OF_CORRECTION)
    """How tokens are weighed for the engine's other probabilities. tis: the ratio, bounded. icepop:
    0 outside the bounds.
    """
    correction_level: Level = term("token", WITH_CORRECTION)
    """Whose ratio. sequence, the product over all tokens, is of no use for long completions."""
    correction_low: float = term(0.0, WITH_CORRECTION, bound=NOT_NEGATIVE)
    """Lower bound. tis: smaller weights are raised to it, which lets unlikely tokens in."""
    correction_high: float = term(math.inf, WITH_CORRECTION, bound=NOT_NEGATIVE, infinite=True)
    """Upper bound. Larger: less bias, more variance."""
    sequence_mask: SequenceMask = term("none", brings=_OF_MASK)
    """Which ratio of a completion must be within mask_low .. mask_high for it to count."""
    mask_low: float = term(0.0, WITH_MASK, bound=NOT_NEGATIVE)
    """Larger: more completions are rejected."""
    mask_high: float = term(math.inf, WITH_MASK, bound=NOT_NEGATIVE, infinite=True)
    """Larger: fewer completions are rejected."""
    kl_coef: float = term(0.0, bound=NOT_NEGATIVE)
    """How strongly the policy is held to the reference. 0: not, and no reference is needed."""
    kl: KlEstimate = term("k3", WITH_KL)
    """The estimate: k1 in the reward; in the loss k2, or k3 with a gradient of its own."""
    kl_in: Literal["loss", "reward"] = term("loss", WITH_KL)
    """Where it is: a loss of its own, or less reward per token."""
    kl_against: Literal["reference", "behaviour"] = term("reference", WITH_KL)
    """To which model: the reference, or the engine that drew (no reference is needed)."""
    kl_gradient: KlGradient = term("direct", WITH_KL, WITH_KL_LOSS)
    """In the loss: direct is what the estimate's formula gives, which for k3 is the gradient of the
    other KL; k2 that of k2; score adds the token's own probability, ratio that and a weight for
    tokens that the engine drew with another one, up to 5; old_ratio the estimate times the ratio
    to the learner before the update, as TRL has it since 1.10.
    """
    kl_clamp: float = term(10.0, WITH_KL, bound=NOT_NEGATIVE, infinite=True)
    """An estimate counts as at most this, and has no gradient beyond."""
    critic: CriticKind = term("head", WITH_CRITIC, off="head")
    """What the critic is. head: a layer on the policy's hidden states, whose loss changes these
    too. detached: a layer that leaves them as the policy makes them; it costs next to nothing and
    can say less. model: a language model of its own (`critic.*`), with an optimiser of its own.
    """
    value_coef: float = term(0.5, WITH_CRITIC, bound=NOT_NEGATIVE)
    """With a critic: weight of its loss."""
    value_clip: float = term(0.0, WITH_CRITIC, bound=NOT_NEGATIVE, off=0.0)
    """With a critic: how far a value may move in one batch and still learn. 0: no bound."""
    entropy_coef: float = term(0.0, bound=NOT_NEGATIVE)
    """Weight of the bonus for entropy. More: the policy stays random for longer."""
    entropy_schedule: ScheduleName = term("constant", WITH_ENTROPY, bound=SCHEDULE)
    """linear, cosine: the bonus falls to zero at the end of the run (run.anneal_over,
    run.anneal_from). module:function of your own: as with learner.optimizer.lr_schedule.
    """
    mask_truncated: bool = term(False)
    """Completions that were cut off have no loss, but their rewards count in the statistics of
    their group. As in TRL: a mean over tokens leaves theirs out, one over completions counts them.
    """
    overlong_share: float = term(0.0, bound=SHARE)
    """Completions that reach into this last share of max_tokens lose reward (DAPO). 0: none do."""
    overlong_factor: float = term(1.0, WITH_OVERLONG, bound=NOT_NEGATIVE)
    """What one loses that fills it."""
    overlong_capped: bool = term(True, WITH_OVERLONG)
    """Whether more than that is never lost (a completion can be longer than max_tokens when tools
    write too).
    """


@dataclass(frozen=True)
class Algorithm(Terms):
    """Every term decided."""

    changed: bool = False
    """Whether a term is not as the preset has it."""

    @property
    def name(self) -> str:
        """The preset, with + when something was changed."""
        return self.preset + ("+" if self.changed else "")

    @property
    def needs_reference(self) -> bool:
        """Log-probs of a reference model are due."""
        return self.kl_coef > 0 and self.kl_against == "reference"

    @property
    def needs_critic(self) -> bool:
        """Values per token are due, and their loss."""
        return self.advantage == "gae" or (
            self.advantage == "vtrace" and self.vtrace_value == "critic"
        )

    @property
    def bootstraps(self) -> bool:
        """What the critic says behind completions that were cut off is due."""
        return self.bootstrap and self.needs_critic

    @property
    def needs_old_logp(self) -> bool:
        """The learner's log-probs before the update are due. With one update per batch they are
        those of its own forward pass, detached.
        """
        return (
            (self.ratio == "old" and self.objective != "reinforce")
            or self.weighs
            or self.advantage == "vtrace"
            or (self.kl_coef > 0 and (self.kl_in == "reward" or self.kl_gradient == "old_ratio"))
        )

    @property
    def needs_groups(self) -> bool:
        """A completion alone in its group teaches nothing, or the wrong thing."""
        if self.advantage == "vtrace":
            return self.vtrace_value == "group"
        if self.advantage == "gae":
            return False
        return self.baseline != "none" or self.scale not in ("none", "batch_std")

    @property
    def weighs(self) -> bool:
        """Tokens are weighed by how far the engine's probabilities are from the learner's."""
        return self.correction != "none" or self.sequence_mask != "none"

    @property
    def skips_zero_advantage(self) -> bool:
        """A completion whose tokens all have advantage 0 has no gradient and may be left out of
        the forward pass, but not out of the denominators.
        """
        return not (
            self.needs_critic or self.entropy_coef or (self.kl_coef and self.kl_in == "loss")
        )

    def annealed(self, factor: float) -> Algorithm:
        """What it is where entropy_schedule has come to this."""
        if self.entropy_schedule == "constant":
            return self
        return replace(self, entropy_coef=factor * self.entropy_coef)

"""An algorithm of LLM post-training with every term decided, and its description; source: none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

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
    WhitenBy,
)

AdvantageKind: TypeAlias = Literal["group", "gae", "vtrace"]
Whiten: TypeAlias = Literal["none"] | WhitenBy


@dataclass(frozen=True)
class Algorithm:
    """Every term of the loss. `AlgorithmConfig` says what each field does when it grows; here none
    is open any more. The defaults are the plainest: REINFORCE with the group's mean taken off.
    """

    name: str = ""
    """The preset it came from, with + when something was changed."""
    advantage: AdvantageKind = "group"
    baseline: Baseline = "mean"
    scale: Scale = "none"
    epsilon: float = 1e-6
    singleton: Singleton = "zero"
    discount: float = 1.0
    gae_lambda: float = 1.0
    bootstrap: bool = False
    vtrace_value: Literal["group", "critic"] = "group"
    rho_clip: float = 1.0
    c_clip: float = 1.0
    whiten: Whiten = "none"
    whiten_epsilon: float = 1e-8
    whiten_unbiased: bool = True
    objective: ObjectiveName = "ppo"
    ratio: Literal["old", "behaviour"] = "old"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    log_ratio_clamp: float = 20.0
    aggregation: Aggregation = "token-mean"
    norm_tokens: int = 0
    correction: Correction = "none"
    correction_level: Level = "token"
    correction_low: float = 0.0
    correction_high: float = math.inf
    sequence_mask: SequenceMask = "none"
    mask_low: float = 0.0
    mask_high: float = math.inf
    kl_coef: float = 0.0
    kl: KlEstimate = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_against: Literal["reference", "behaviour"] = "reference"
    kl_gradient: KlGradient = "direct"
    kl_clamp: float = 10.0
    value_coef: float = 0.5
    value_clip: float = 0.0
    entropy_coef: float = 0.0
    overlong_share: float = 0.0
    overlong_factor: float = 1.0
    overlong_capped: bool = True

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
            or (self.kl_coef > 0 and self.kl_in == "reward")
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

    def describe(self) -> str:
        """One line per term: what is in force."""
        return "\n".join(f"{name:<12}{text}" for name, text in self.terms().items())

    def terms(self) -> dict[str, str]:
        """What is in force, by the name of the term."""
        return {
            "advantage": self._advantage(),
            "objective": self._objective(),
            "aggregation": self._aggregation(),
            "correction": self._correction(),
            "KL": self._kl(),
            "overlong": self._overlong(),
        }

    def _advantage(self) -> str:
        if self.advantage == "group":
            text = {
                "none": "reward",
                "mean": "reward - group mean",
                "leave_one_out": "reward - mean of the others",
            }[self.baseline]
            text += {
                "none": "",
                "std": f", / (group std + {self.epsilon:g})",
                "std_biased": f", / (biased group std + {self.epsilon:g})",
                "leave_one_out_std": f", / (std of the others + {self.epsilon:g})",
                "batch_std": f", / (batch std + {self.epsilon:g})",
            }[self.scale]
            if self.discount != 1.0:
                text += f", discounted {self.discount:g} per token"
        elif self.advantage == "gae":
            text = f"GAE, discount {self.discount:g}, lambda {self.gae_lambda:g}, with a critic"
            text += ", bootstrapped when cut off" if self.bootstrap else ""
        else:
            value = "a critic" if self.vtrace_value == "critic" else "the mean of the others"
            text = (
                f"V-trace, value: {value}, rho <= {self.rho_clip:g}, c <= {self.c_clip:g}, "
                f"discount {self.discount:g}, lambda {self.gae_lambda:g}"
            )
            text += ", bootstrapped when cut off" if self.bootstraps else ""
        if self.whiten != "none":
            kind = "unbiased" if self.whiten_unbiased else "biased"
            text += f"; whitened over the batch's tokens ({kind}, {self.whiten_epsilon:g})"
        return text

    def _objective(self) -> str:
        if self.objective == "reinforce":
            return "REINFORCE: no ratio, no clip"
        against = "the learner before the update" if self.ratio == "old" else "the engine"
        bounds = f"[{1 - self.clip_low:g}, {1 + self.clip_high:g}]"
        text = {
            "ppo": f"PPO, ratio in {bounds}",
            "cispo": f"CISPO, weight in {bounds}",
            "gspo": f"GSPO, ratio of the completion in {bounds}",
            "sapo": f"SAPO, tau {self.tau_positive:g} / {self.tau_negative:g}",
            "dppo": f"DPPO, probability moves by -{self.clip_low:g} .. +{self.clip_high:g}",
        }[self.objective]
        if self.dual_clip:
            text += f", dual clip {self.dual_clip:g}"
        return f"{text}; against {against}"

    def _aggregation(self) -> str:
        if self.aggregation != "seq-mean-token-sum-norm":
            return self.aggregation
        constant = str(self.norm_tokens) if self.norm_tokens else "max_tokens"
        return f"{self.aggregation}, / {constant} per completion"

    def _correction(self) -> str:
        if self.advantage == "vtrace":
            return "V-trace, in the advantage"
        if self.ratio == "behaviour":
            return "none besides the ratio, which is to the engine"
        if not self.weighs:
            return "none: the engine's log-probs are trusted"
        whose = {
            "token": "the token's ratio",
            "sequence": "the completion's ratio (product)",
            "geometric": "the completion's ratio (geometric mean)",
        }[self.correction_level]
        bounds = f"[{self.correction_low:g}, {self.correction_high:g}]"
        text = {
            "none": "",
            "tis": f"TIS: {whose} clamped to {bounds}",
            "icepop": f"IcePop: {whose}, 0 outside {bounds}",
        }[self.correction]
        if self.sequence_mask != "none":
            mean = "product" if self.sequence_mask == "product" else "geometric mean"
            text += ", " if text else ""
            text += f"completions whose {mean} is outside [{self.mask_low:g}, {self.mask_high:g}]"
            text += " weigh 0"
        return text

    def _kl(self) -> str:
        if not self.kl_coef:
            return "none"
        where = "in the reward" if self.kl_in == "reward" else "in the loss"
        other = "reference" if self.kl_against == "reference" else "engine"
        text = f"{self.kl_coef:g} {self.kl} to the {other}, {where}"
        if self.kl_in == "loss" and self.kl_gradient != "direct":
            text += f", gradient {self.kl_gradient}"
        return text

    def _overlong(self) -> str:
        if not self.overlong_share:
            return "none"
        capped = "capped" if self.overlong_capped else "not capped"
        return (
            f"up to -{self.overlong_factor:g} over the last {self.overlong_share:.0%} of "
            f"max_tokens, {capped}"
        )

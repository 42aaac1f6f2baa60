"""Groups of which nothing is learned: a run whose settings discard them all ends, and says why."""

from __future__ import annotations

from collections import Counter

from unirl.errors import ActorFailed

_WHY = {
    "zero_variance": (
        "the rewards of each were all equal",
        "rollout.zero_variance is discard",
        "the task is solved or too hard for the model, or reward.weights judge nothing: change "
        "them, or set rollout.zero_variance to skip",
    ),
    "filtered": (
        "the filter kept none",
        "rollout.filter says what is kept",
        "loosen the filter, or leave rollout.filter out",
    ),
    "reward_failed": (
        "no reward judged them",
        "a group needs a completion that all of reward.weights have scored",
        "look at the log for why they fail",
    ),
    "infrastructure": (
        "their episodes failed for what the policy cannot have caused",
        "each was tried again agent.retries times",
        "look at the log for why they fail: a world, a tool or a sandbox that is gone",
    ),
    "truncated": (
        "all of their completions were cut off",
        "algorithm.mask_truncated leaves those out",
        "raise sampling.max_tokens, or set algorithm.mask_truncated to false",
    ),
    "rejected": (
        "the correction gave all of their tokens the weight 0",
        "algorithm.correction_low .. correction_high and mask_low .. mask_high say which ratios "
        "between learner and engine count",
        "widen them, or find out why the engine computes other probabilities: "
        "sampling/sampling_logp_difference",
    ),
}
"""By reason: what was seen, the setting, the remedy."""


class InVain:
    """Counts groups in a row. most: at which the run ends; 0: never."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reasons: Counter[str] = Counter()

    def count(self, reason: str, groups: int = 1) -> None:
        """Nothing is learned of so many groups. Raises ActorFailed when there were too many."""
        self._reasons[reason] += groups
        total = self._reasons.total()
        if reason in _WHY and self._most and total >= self._most:
            [(main, number)] = self._reasons.most_common(1)
            seen, rule, remedy = _WHY[main]
            raise ActorFailed(
                f"nothing was learned of {total} groups in a row: {seen}"
                + (f" ({number} of them)" if number < total else ""),
                f"{rule}, and rollout.give_up_after is {self._most}",
                remedy,
            )

    def reset(self) -> None:
        """Something was learned of a group."""
        self._reasons.clear()

"""What an episode earned by itself: its outcome, and the step rewards of its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.rewards.reward import as_score, failed
from unirl.llm.tasks.prompts import Prompt, Said


async def outcome(prompt: Prompt, text: str, completion: Completion) -> Score:
    """What the agent or its world said at the end; failed where nothing was said."""
    if not isinstance(text, Said) or text.outcome is None:
        return failed("no outcome: neither the agent nor its world gave one")
    return as_score(text.outcome)


async def steps(prompt: Prompt, text: str, completion: Completion) -> Score:
    """The sum of the step rewards."""
    if not isinstance(text, Said) or not text.turns:
        return failed("there are no steps: no agent made this")
    return as_score(sum(float(turn.get("reward") or 0.0) for turn in text.turns))


OF_EPISODES: Mapping[str, Callable[[Prompt, str, Completion], Awaitable[Score]]] = MappingProxyType(
    {"outcome": outcome, "steps": steps}
)
"""By their name in reward.weights."""

"""What an episode earned by itself: its outcome, and the step rewards of its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from unirl.llm.engine import Completion
from unirl.llm.group import Score
from unirl.llm.rewards.reward import as_score, failed
from unirl.llm.rewards.rules import characters
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


async def call(prompt: Prompt, text: str, completion: Completion) -> Score:
    """How much of the first turn is the call that the task expects, `info["call"]`, character by
    character. What shapes models that must find the form of a call by chance.
    """
    expected = prompt.info.get("call")
    if expected is None:
        return failed(f'example {prompt.index} of {prompt.task} has no info["call"]')
    turns = text.turns if isinstance(text, Said) else ()
    return as_score(characters(str(turns[0]["drawn_text"]), str(expected)) if turns else 0.0)


OF_EPISODES: Mapping[str, Callable[[Prompt, str, Completion], Awaitable[Score]]] = MappingProxyType(
    {"outcome": outcome, "steps": steps, "call": call}
)
"""By their name in reward.weights."""

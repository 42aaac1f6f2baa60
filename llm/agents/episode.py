"""An episode: one attempt at a task, as a tree of turns in token space.

What is trained is what was drawn, token by token: nothing here was ever decoded and encoded again.
A conversation that is only ever appended to is one path; one that is forked, rewritten or
compacted, and a sub-agent's, has turns of its own beside it. Each leaf of the tree is a segment of
the episode's sample, and each turn is trained in the first segment that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from unirl.llm.engine import NOBODY, Completion
from unirl.llm.outcome import Ending
from unirl.llm.tasks.task import Message

ROOT = -1
"""Parent of a turn that continues no other one."""
Origin = Literal["prompt", "extended", "forked", "rewritten", "replayed"]
"""How a turn's prompt came about. prompt: the first of its episode. extended: by a path's whole
tokens. forked: a turn that others continue as well. rewritten: from a history that no stored path
has, as after compaction, and by a sub-agent: a root of its own.
"""


@dataclass(frozen=True)
class Turn:
    """One answer of the model, and what it was given before it."""

    parent: int
    """Number of the turn that it continues; ROOT: none."""
    given: tuple[int, ...]
    """Tokens between the parent's last one and the answer; of a root, its whole prompt."""
    completion: Completion
    """What was drawn, and nothing else."""
    messages: tuple[Message, ...] = ()
    """What it was given, as messages; of a root the whole conversation."""
    answer: Message = field(default_factory=dict)
    """What was answered, as the agent was given it."""
    origin: Origin = "extended"
    trained: bool = True
    """False: it is context alone, as turns are that nobody read."""
    reward: float | None = None
    """Step reward; at its last drawn token, but for what `token_rewards` say."""
    token_rewards: tuple[float, ...] = ()
    """How much of it is at each drawn token; (): nothing is known."""
    started: float = 0.0
    """Seconds since the episode began."""
    seconds: float = 0.0
    """That the answer took."""
    info: dict[str, Any] = field(default_factory=dict)
    """Values that JSON can hold: calls, invalid_calls, failed_calls, tool_seconds, where the native
    loop drives.
    """


class Segment(NamedTuple):
    """A path from a root to a leaf: one entry per token, but for the group's prompt."""

    is_shared: bool
    """Whether it continues the group's prompt, which is not in it; False: it has its own."""
    token: tuple[int, ...]
    logp: tuple[float, ...]
    version: tuple[int, ...]
    mask: tuple[bool, ...]
    """Whether the token is trained here: drawn, and in no segment before."""
    turn: tuple[int, ...]
    """Number of the turn that drew the token, or was given it."""
    step_reward: tuple[float, ...]


@dataclass
class Episode:
    """One attempt at a task."""

    turns: list[Turn] = field(default_factory=list)
    ending: Ending = "stop"
    why: str = ""
    """More about the ending, in words."""
    outcome: float | None = None
    """What the agent or its world says it earned; None: nothing was said."""
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_drawn(self) -> int:
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def versions(self) -> list[int]:
        """Of all tokens that were drawn."""
        return [each for turn in self.turns for each in turn.completion.version]

    def path(self, number: int) -> list[int]:
        """Turns from the root to this one, itself included."""
        found = []
        while number != ROOT:
            found.append(number)
            number = self.turns[number].parent
        return found[::-1]

    def tokens(self, number: int) -> tuple[int, ...]:
        """Everything that was in the model's context when this turn had ended; ROOT: nothing."""
        found: list[int] = []
        for each in self.path(number):  # whole pieces: they may have 100 000 tokens
            found += self.turns[each].given
            found += self.turns[each].completion.tokens
        return tuple(found)

    @property
    def leaves(self) -> list[int]:
        """Turns that nothing continues, in their order."""
        parents = {turn.parent for turn in self.turns}
        return [number for number in range(len(self.turns)) if number not in parents]

    def segments(
        self, prompt: Sequence[int] = (), fits: Callable[[Segment], bool] = lambda segment: True
    ) -> list[Segment]:
        """One for each leaf of which something is trained. prompt: the group's; a path that begins
        with exactly these tokens shares it. fits: what of them is kept; what a path would have
        trained that is not kept is trained in the next one that holds it.
        """
        prompt, found, seen = tuple(prompt), [], set[int]()
        for leaf in self.leaves:
            path = self.path(leaf)
            if any(self.turns[each].trained and each not in seen for each in path):
                segment = self._segment(path, prompt, seen)
                if fits(segment):
                    found.append(segment)
                    seen.update(path)
        return found

    def _segment(self, path: Sequence[int], prompt: tuple[int, ...], seen: set[int]) -> Segment:
        token: list[int] = []
        logp: list[float] = []
        version: list[int] = []
        mask: list[bool] = []
        number: list[int] = []
        step: list[float] = []
        is_shared = bool(prompt) and self.turns[path[0]].given[: len(prompt)] == prompt
        for each in path:
            turn = self.turns[each]
            given = turn.given[len(prompt) :] if is_shared and turn.parent == ROOT else turn.given
            drawn, learns = turn.completion, turn.trained and each not in seen
            token += (*given, *drawn.tokens)
            logp += (0.0,) * len(given) + drawn.logp
            version += (NOBODY,) * len(given) + drawn.version
            mask += (False,) * len(given) + (learns,) * len(drawn.tokens)
            number += (each,) * (len(given) + len(drawn.tokens))
            step += (0.0,) * (len(given) + len(drawn.tokens))
            if learns and turn.reward is not None and drawn.tokens:
                if turn.token_rewards:
                    step[-len(drawn.tokens) :] = turn.token_rewards
                step[-1] += turn.reward - math.fsum(turn.token_rewards)
        columns = (token, logp, version, mask, number, step)
        return Segment(is_shared, *map(tuple, columns))  # type: ignore[arg-type]

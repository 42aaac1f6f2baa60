"""An episode with what surrounds it: what a store is given, and gives back."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unirl.llm.agents.episode import ROOT, Episode, Turn
from unirl.llm.outcome import SCORE, Ending, Score
from unirl.llm.trajectories import frames

State = Literal["open", "done", "leased", "trained", "expired", "failed"]
"""open: it has begun, and has no body. done: it may be learned from. leased: a consumer has it.
trained: it was learned from, at an update that has a number. expired: only its row is left. failed:
it ended by what the policy cannot have caused, and is never learned from.
"""
NO_TICKET = -1
LOST: frozenset[Ending] = frozenset({"infrastructure", "aborted"})
"""Endings of episodes that nothing is learned from."""


@dataclass(frozen=True)
class Record:
    """One episode, and where it comes from."""

    episode: Episode
    run: str
    """Name of the run: episodes of several may be in one store."""
    ticket: int = NO_TICKET
    """Of its group; NO_TICKET: it was never in a queue, as what is imported."""
    place: int = 0
    """Which of the ticket's group."""
    group_size: int = 1
    prompt: tuple[int, ...] = ()
    """Tokens of the group's prompt."""
    task: str = ""
    task_id: str = ""
    """Which example of the task."""
    split: str = "train"
    scores: Mapping[str, Score] = field(default_factory=dict)
    """By the reward's name."""
    reward: float | None = None
    """All rewards together, as they were weighted; None: the sum of the scores, if there are any
    and none is missing.
    """
    agent: str = ""
    env: str = ""
    sandbox: str = ""
    """Level of isolation."""
    engine: str = ""
    task_digest: str = ""
    env_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    created: float = field(default_factory=time.time)
    """Seconds since 1970 at which it began."""
    state: State = "done"
    trained_version: int | None = None
    """Number of the update that learned from it."""
    line: tuple[Mapping[str, Any], Sequence[tuple[Any, ...]]] | None = field(
        default=None, compare=False, repr=False
    )
    """What is left where tokens and texts were dropped: its row, and those of its turns."""
    hash: bytes = field(default=b"", compare=False, repr=False)
    """The digest of what was dropped."""

    def bare(self) -> Record:
        """Without tokens and texts."""
        episode = replace(self.episode, turns=[], info={})
        line = (self.row(), tuple(self.steps()))
        return replace(self, episode=episode, prompt=(), line=line, hash=self.digest())

    @property
    def total(self) -> float | None:
        """Its reward, if it has one."""
        if self.reward is not None or not self.scores:
            return self.reward
        values = [each.value for each in self.scores.values() if each.outcome == SCORE]
        return sum(values) if len(values) == len(self.scores) else None

    def body(self, clean: Callable[[str], str] = str) -> tuple[bytes, bytes]:
        """Tokens and texts as they are stored, and the digest. clean: may change texts."""
        digest = self._begun_digest()
        body = frames.encode(self.episode, self.prompt, clean, digest)
        return body, self.hash or digest.digest()

    def digest(self) -> bytes:
        """What makes it the same episode: a hash of task, environment, ticket and the tokens of its
        tree. Without a ticket, of its run, example, version and time as well: what was asked twice
        may have been answered alike.
        """
        if self.hash:
            return self.hash
        digest = self._begun_digest()
        for turn in self.episode.turns:
            frames.hash_turn(turn, digest)
        return digest.digest()

    def _begun_digest(self) -> hashlib.blake2b:
        names = [self.task_digest, self.env_digest, str(self.ticket), str(self.place)]
        if self.ticket == NO_TICKET:
            names += [self.run, self.task_id, str(self.version_max), repr(self.created)]
        return hashlib.blake2b("\0".join(names).encode("utf-8", "replace"), digest_size=16)

    @property
    def version_max(self) -> int | None:
        """The largest that drew one of its tokens."""
        if self.line is not None:
            found: int | None = self.line[0]["version_max"]
            return found
        return max((each for turn in self.episode.turns for each in _ends(turn)), default=None)

    def row(self) -> dict[str, Any]:
        """Its line of the index: what can be asked for without reading bodies."""
        if self.line is not None:
            return dict(self.line[0])
        episode, turns = self.episode, self.episode.turns
        versions = [each for turn in turns for each in _ends(turn)]
        model = sum(turn.seconds for turn in turns)
        return {
            "ticket": self.ticket,
            "place": self.place,
            "group_size": self.group_size,
            "task": self.task,
            "task_id": self.task_id,
            "task_digest": self.task_digest,
            "split": self.split,
            "state": "failed" if episode.ending in LOST else self.state,
            "ending": episode.ending,
            "why": episode.why[:400],
            "reward": self.total,
            "outcome": episode.outcome,
            "scores": json.dumps({name: list(vars(s).values()) for name, s in self.scores.items()}),
            "version_min": min(versions, default=None),
            "version_max": max(versions, default=None),
            "trained_version": self.trained_version,
            "turns": len(turns),
            "segments": len(episode.leaves),
            "drawn": sum(map(_num_drawn, turns)),
            "tokens": sum(len(turn.given) + len(turn.completion.tokens) for turn in turns),
            "seconds": episode.seconds,
            "seconds_model": model,
            "seconds_tools": sum(float(turn.info.get("tool_seconds", 0) or 0) for turn in turns),
            "agent": self.agent,
            "env": self.env,
            "env_digest": self.env_digest,
            "sandbox": self.sandbox,
            "engine": self.engine,
            "tokenizer_digest": self.tokenizer_digest,
            "template_digest": self.template_digest,
            "created": self.created,
            "finished": self.created + episode.seconds,
        }

    def steps(self) -> Iterator[tuple[Any, ...]]:
        """A line of the index for each turn, in the order of `STEP`."""
        if self.line is not None:
            yield from self.line[1]
            return
        segment_of = _segments(self.episode)
        for index, turn in enumerate(self.episode.turns):
            error = turn.info.get("error")
            ok = turn.info.get("ok", None if error is None else False)
            yield (
                index,
                turn.parent,
                segment_of[index],
                turn.origin,
                ",".join(tools_of(turn)) or None,
                None if ok is None else int(bool(ok)),
                None if error is None else str(error)[:400],
                turn.reward,
                _num_drawn(turn),
                len(turn.given) + len(turn.completion.tokens),
                max(_ends(turn), default=None),
                turn.started,
                turn.seconds,
            )


STEP = (
    "idx", "parent", "segment", "origin", "tool", "ok", "error", "reward", "drawn", "tokens",
    "version", "started", "seconds",
)  # fmt: skip


def tools_of(turn: Turn) -> list[str]:
    """Names of the tools that a turn calls."""
    calls = turn.answer.get("tool_calls")
    if not calls or not isinstance(calls, Sequence):
        return []
    functions = (call.get("function") for call in calls if isinstance(call, Mapping))
    return [str(each.get("name", "")) for each in functions if isinstance(each, Mapping)]


def _num_drawn(turn: Turn) -> int:
    drawn = turn.completion.drawn
    return sum(drawn) if drawn else len(turn.completion.tokens)


def _ends(turn: Turn) -> tuple[int, ...]:
    """The smallest and the largest version: it never falls while a completion is drawn."""
    drawn = turn.completion
    versions = drawn.drawn_versions if drawn.drawn else drawn.version
    return (versions[0], versions[-1]) if versions else ()


def _segments(episode: Episode) -> list[int]:
    """For each turn the number of the first path that holds it."""
    found = [-1] * len(episode.turns)
    for number, leaf in enumerate(episode.leaves):
        turn = leaf
        while turn != ROOT and found[turn] < 0:
            found[turn] = number
            turn = episode.turns[turn].parent
    return found

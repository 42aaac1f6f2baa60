"""Who drives an episode: it has a session with the model, and never sees tokens or weights."""

from __future__ import annotations

import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unirl.errors import Restartable, UniRLError
from unirl.imports import load_own
from unirl.llm.agents.session import Session
from unirl.llm.outcome import ENDINGS, Ending
from unirl.llm.tasks.task import Message, Task


@dataclass(frozen=True)
class AgentTask:
    """What an agent knows of its task."""

    name: str
    messages: tuple[Message, ...]
    info: Mapping[str, Any]
    index: int
    seed: int
    """Of this attempt: a world that is reset with it is the same at every repetition."""
    answer: str = field(default="", repr=False)
    """For worlds, which judge; never for the model."""


class Agent(Protocol):
    """Made once for an engine's process."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """What the prompt of each episode says may be called; () where the agent alone knows."""

    def task(self) -> Task | None:
        """What its world brings to be done; None: the run's own task is done."""

    async def run(self, task: AgentTask, session: Session) -> Ending:
        """One episode. Raises what is a `Restartable` (WorldFailed, SandboxFailed) for what the
        policy cannot have caused.
        """

    async def close(self) -> None:
        """Let go of processes and connections; idempotent."""


class EpisodeFailed(Restartable):
    """What the policy cannot have caused has ended an episode."""


AgentFunction = Callable[[Session, AgentTask], Awaitable[Any]]
"""An own agent. It returns a number, the episode's outcome; the name of an ending; or None."""


class FunctionAgent:
    """An own async function."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: AgentFunction = load_own(name, f"agent.function {name}")
        if not callable(self._function):
            raise UniRLError(
                f"agent.function {name} is no function",
                f"it must be an async function of (session, task), and is {self._function!r:.60}",
                "name a function",
            )

    def task(self) -> Task | None:
        return None

    async def run(self, task: AgentTask, session: Session) -> Ending:
        said = await self._function(session, task)
        if said is None:
            return "stop"
        if isinstance(said, str) and said in ENDINGS:
            return said
        if isinstance(said, numbers.Real):
            session.episode.outcome = float(said)
            return "stop"
        raise UniRLError(
            f"agent.function {self._name} returned {said!r:.60}",
            f"it must return a number, None, or one of {', '.join(ENDINGS)}",
            "return the episode's outcome",
        )

    async def close(self) -> None:
        """Nothing to let go of."""

"""A Gymnasium environment as a world: `gym:CartPole-v1`.

Observations are text: the picture of a text game (render mode ansi) where it draws one, else each
number with its name. An action is its name or number, alone or in the answer's last line, or a call
of `act`. Names are read from the environment's own documentation; options: `actions` and
`observations` (names with commas), `act` = text | tool, `tasks` (how many starts), `keyword=value`
for what gymnasium.make takes.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from unirl.errors import UniRLError, format_error
from unirl.llm.agents.threads import OwnThread
from unirl.llm.agents.worlds.world import (
    Action,
    Observation,
    Split,
    ToolSchema,
    WorldFailed,
    answered,
)
from unirl.llm.tasks.task import Example, Examples

_OWN_OPTIONS = ("actions", "observations", "act", "tasks")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MARKS = ((r"4\d", "*", "*"), (r"34;1", "(", ")"), (r"35", "[", "]"))
"""What stands around a cell that a text game marks by a colour, which would be lost."""
_NOTES = {"Taxi": "The taxi is * *, the passenger waits at ( ) and wants to go to [ ]."}
NUM_HELD_OUT = 100


@dataclass(frozen=True)
class _Words:
    """How an environment is spoken of."""

    actions: tuple[str, ...]
    """() where they are no finite set."""
    observations: tuple[str, ...]
    draws: bool


class GymWorld:
    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self.name = f"gym:{name}"
        self._id = name
        self._options = {key: text for key, text in options.items() if key in _OWN_OPTIONS}
        self._keywords = {
            key: _value(text) for key, text in options.items() if key not in _OWN_OPTIONS
        }
        self._uses_tool = _one_of(self.name, "act", self._options.get("act", "text"))
        self._num_tasks = _count(self.name, self._options.get("tasks", "1000"))
        env = self._make(draws=False)
        modes = env.metadata.get("render_modes", ())
        documentation = env.unwrapped.__doc__ or ""
        self._space = env.action_space
        _require_space(self.name, self._space)
        self._words = _Words(
            _names(self._options.get("actions"), documentation, "Action", _num_actions(env)),
            _names(
                self._options.get("observations"),
                documentation,
                "Observation",
                int(np.prod(env.observation_space.shape or ())),
            ),
            "ansi" in modes,
        )
        env.close()

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return (self._schema(),) if self._uses_tool else ()

    def __call__(self) -> GymClient:
        return GymClient(partial(self._make, draws=self._words.draws), self._words)

    def tasks(self, split: Split) -> Examples:
        """A start for each seed; those held out have seeds of their own."""
        first, size = (0, self._num_tasks) if split == "train" else (self._num_tasks, NUM_HELD_OUT)
        return _Starts(self._rules(), first, size)

    def _make(self, draws: bool) -> Any:
        mode: dict[str, Any] = {"render_mode": "ansi"} if draws else {}
        try:
            return gymnasium.make(self._id, **mode, **self._keywords)
        except Exception as error:  # whatever an environment's constructor raises
            raise UniRLError(
                f'the world "{self.name}" cannot be made',
                f"{type(error).__name__}: {error}",
                "name an environment that gymnasium.make knows, and options that it takes",
            ) from error

    def _rules(self) -> str:
        if self._words.actions:
            names = "; ".join(f"{i}: {name}" for i, name in enumerate(self._words.actions))
            what = f"The actions are {names}."
            how = "its number alone"
        else:
            what = f"An action is a list of {_size(self._space)} numbers."
            how = "the list alone"
        how = "by a call of act" if self._uses_tool else f"with {how}"
        note = _NOTES.get(self._id.partition("-")[0], "") if self._words.draws else ""
        rules = f"You act in {self._id}. {what} Answer each observation {how}."
        return f"{rules} {note}".strip()

    def _schema(self) -> ToolSchema:
        values: Mapping[str, Any] = (
            {"type": "string", "enum": list(self._words.actions)}
            if self._words.actions
            else {"type": "array", "items": {"type": "number"}}
        )
        parameters = {
            "type": "object",
            "properties": {"action": values},
            "required": ["action"],
            "additionalProperties": False,
        }
        function = {"name": "act", "description": "Take an action.", "parameters": parameters}
        return {"type": "function", "function": function}


class GymClient:
    """One episode of it, in a thread of its own."""

    def __init__(self, make: partial[Any], words: _Words) -> None:
        self._make, self._words = make, words
        self._env: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        start = (task.get("info") or {}).get("seed", seed)
        text = await self._run(partial(self._reset, int(start) % 2**31))
        return Observation(answered("", text))

    async def step(self, action: Action) -> Observation:
        said = action if isinstance(action, str) else action.arguments.get("action")
        number = self._read(said)
        if number is None:
            wanted = "one of " + ", ".join(self._words.actions) if self._words.actions else "a list"
            text = f"Error: this is no action; it must be {wanted}. Nothing has happened."
            return Observation(answered(action, text), is_invalid=True)
        text, reward, terminated, truncated = await self._run(partial(self._step, number))
        return Observation(answered(action, text), reward, terminated, truncated)

    async def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await self._thread.call(env.close)
        self._thread.close()

    async def _run(self, function: Any) -> Any:
        try:
            return await self._thread.call(function)
        except UniRLError:
            raise
        except Exception as error:
            raise WorldFailed(format_error(error), "a simulator raised it", "", "code") from error

    def _reset(self, seed: int) -> str:
        if self._env is None:
            self._env = self._make()
        observation, _ = self._env.reset(seed=seed)
        return self._text(observation)

    def _step(self, action: Any) -> tuple[str, float, bool, bool]:
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            action = (
                np.asarray(action, space.dtype).reshape(space.shape).clip(space.low, space.high)
            )
        else:
            action = int(space.start) + action
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return self._text(observation), float(reward), bool(terminated), bool(truncated)

    def _text(self, observation: Any) -> str:
        if self._words.draws:
            return drawing(self._env.render())
        return in_words(observation, self._words.observations)

    def _read(self, said: Any) -> Any:
        """The action that was said; None: there is none in it."""
        if self._words.actions:
            return chosen(said, self._words.actions)
        space = self._env.action_space
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
            numbers = json.loads(_last_line(said)) if isinstance(said, str) else said
            numbers = numbers if isinstance(numbers, list) else [numbers]
            values = [float(each) for each in numbers]
            if len(values) == _size(space) and all(map(math.isfinite, values)):
                return values
        return None


@dataclass(frozen=True)
class _Starts:
    rules: str
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Example:
        message = {"role": "system", "content": self.rules}
        return Example(messages=(message,), info={"seed": self.first + index})


def chosen(said: Any, names: Sequence[str]) -> int | None:
    """The number of an action that is named by its name or its number."""
    if isinstance(said, int) and not isinstance(said, bool):
        return said if 0 <= said < len(names) else None
    if not isinstance(said, str):
        return None
    line = _last_line(said).casefold().strip(" .!\"'`*")
    line = line.removeprefix("action:").strip()
    if line.isascii() and line.isdecimal():
        return chosen(int(line[:9]), names)
    folded = [name.casefold() for name in names]
    return folded.index(line) if line in folded else None


def drawing(picture: Any) -> str:
    """A text game's picture, with marks where it has colours alone."""
    text = str(picture)
    for colour, left, right in _MARKS:
        text = re.sub(rf"\x1b\[{colour}m(.)\x1b\[0m", rf"{left}\1{right}", text)
    return _COLOURS.sub("", text).strip("\n")


def in_words(observation: Any, names: Sequence[str]) -> str:
    if isinstance(observation, tuple):
        values: list[Any] = list(observation)
    elif isinstance(observation, Mapping):
        return "\n".join(f"{key}: {in_words(each, ())}" for key, each in observation.items())
    else:
        values = np.asarray(observation).reshape(-1).tolist()
    texts = [f"{each:.4g}" if isinstance(each, float) else str(each) for each in values]
    if len(names) == len(texts):
        return "\n".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    return " ".join(texts)


def _names(given: str | None, documentation: str, what: str, count: int) -> tuple[str, ...]:
    """Of each action or part of an observation; numbers where nothing is documented."""
    if given is not None:
        names = [each.strip() for each in given.split(",")]
    else:
        found = re.split(rf"^\s*## {what} Space.*$", documentation, flags=re.M)
        body = re.split(r"^\s*## ", found[1], flags=re.M)[0] if len(found) > 1 else ""
        rows = re.findall(r"^\s*(?:- (\d+): |\| (\d+) +\| )([^|\n]+)", body, re.M)
        numbered = {int(first or second): name.strip() for first, second, name in rows}
        names = [numbered[i] for i in range(count)] if set(numbered) == set(range(count)) else []
    if len(names) == count and len(set(map(str.casefold, names))) == count:
        return tuple(names)
    if given is not None:
        raise UniRLError(
            f"agent.options gives {len(names)} names of {what.lower()}s",
            f"the environment has {count}, and each has a name of its own",
            "give as many, with commas between them",
        )
    return tuple(map(str, range(count)))


def _num_actions(env: Any) -> int:
    space = env.action_space
    return int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0


def _require_space(world: str, space: Any) -> None:
    if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.Box):
        raise UniRLError(
            f'the world "{world}" has actions of {type(space).__name__}',
            "they must be of Discrete or Box, to be said in words",
            "wrap it, or write a world of your own: text:module:Class",
        )


def _size(space: Any) -> int:
    return int(np.prod(space.shape))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _one_of(world: str, key: str, value: str) -> bool:
    if value not in ("text", "tool"):
        raise UniRLError(
            f'agent.options.{key} is "{value}"',
            f"the world {world} takes text or tool",
            "leave it out for text",
        )
    return value == "tool"


def _count(world: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= 2**30):
        raise UniRLError(
            f'agent.options.tasks is "{value}"',
            f"the number of starts that the world {world} has must be from 1 to {2**30}",
            "1000 is the default",
        )
    return int(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

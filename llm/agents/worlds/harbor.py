"""Task folders of Harbor and Terminal-Bench as a world: `harbor:DIR`.

Each folder below DIR has task.toml (limits), instruction.md, tests/test.sh and perhaps environment/
with files. The model works in a sandbox by calls of `bash`; an answer without a call ends its work.
Only then are the tests put in, and run; they write a number into logs/verifier/reward.txt of the
workspace, or named ones into reward.json. Images are not built here: option `image` names one.

Source: harborframework.com, the task format.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unirl.errors import UniRLError
from unirl.llm.agents.worlds.server import require_options
from unirl.llm.agents.worlds.world import (
    Action,
    Observation,
    Split,
    WorldFailed,
    answered,
    shortened,
)
from unirl.llm.tasks.task import Example, Examples

_TESTS = "tests"
_REWARDS = ("logs/verifier/reward.json", "logs/verifier/reward.txt")
_MAX_OUTPUT = 20_000
_HELD_OUT_EVERY = 10
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the task's machine.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}


class Box(Protocol):
    """What is needed of a sandbox."""

    async def exec(
        self,
        argv: list[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float,
        max_output: int,
    ) -> Any: ...

    async def put(self, path: str, data: bytes) -> None: ...

    async def get(self, path: str, max_bytes: int) -> bytes: ...

    async def close(self) -> None: ...


OpenBox = Callable[["HarborTask"], Awaitable[Box]]
"""A sandbox for a task: its image, files and limits are the task's."""


@dataclass(frozen=True)
class HarborTask:
    folder: Path
    instruction: str
    agent_seconds: float
    verifier_seconds: float
    memory_mb: int
    image: str

    @property
    def name(self) -> str:
        return self.folder.name


class HarborWorld:
    """open_box: makes a task's sandbox; given by the run, which owns the sandboxes."""

    def __init__(self, folder: str, options: Mapping[str, str], open_box: OpenBox | None) -> None:
        self.name = f"harbor:{folder}"
        self.tools = (_BASH,)
        require_options(self.name, options, ("sandbox", "image"))
        self._tasks = {task.name: task for task in read_tasks(Path(folder), options.get("image"))}
        if open_box is None:
            raise UniRLError(
                f'the world "{self.name}" has no sandbox',
                "its tasks are worked on in one, and the run was given none",
                "set agent.options.sandbox",
            )
        self._open = open_box

    def __call__(self) -> HarborClient:
        return HarborClient(self._tasks, self._open)

    def tasks(self, split: Split) -> Examples:
        """Every tenth folder, in the order of their names, is held out."""
        return [
            Example(
                messages=({"role": "user", "content": task.instruction},), info={"harbor": name}
            )
            for i, (name, task) in enumerate(sorted(self._tasks.items()))
            if (i % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == (split == "held_out")
        ]


class HarborClient:
    def __init__(self, tasks: Mapping[str, HarborTask], open_box: OpenBox) -> None:
        self._tasks, self._open = tasks, open_box
        self._task: HarborTask | None = None
        self._box: Box | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        await self.close()
        name = str((task.get("info") or {}).get("harbor"))
        if name not in self._tasks:
            raise UniRLError(
                f'the task "{name}" is no folder of the world',
                f"it has {', '.join(list(self._tasks)[:5])} and so on",
                "take the tasks from the world itself",
            )
        self._task = self._tasks[name]
        self._box = await self._open(self._task)
        for path, data in _files(self._task.folder / "environment"):
            if path != "Dockerfile":
                await self._box.put(path, data)
        return Observation(tools=(_BASH,))

    async def step(self, action: Action) -> Observation:
        if self._task is None or self._box is None:
            raise WorldFailed("there is no sandbox", "the world was not reset", "", "closed")
        if isinstance(action, str):
            return await self._verified(self._task, self._box)
        command = action.arguments.get("command")
        if action.name != "bash" or not isinstance(command, str):
            text = "Error: bash is what can be called, with a command that is text."
            return Observation(answered(action, text), is_invalid=True)
        ran = await self._box.exec(
            ["bash", "-c", command], seconds=self._task.agent_seconds, max_output=_MAX_OUTPUT
        )
        text = shortened(ran.output.decode(errors="replace"), _MAX_OUTPUT)
        if ran.killed:
            text += f"\n[killed: {ran.killed}]"
        elif ran.rc:
            text += f"\n[exit status {ran.rc}]"
        return Observation(answered(action, text or "[no output]"))

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    async def _verified(self, task: HarborTask, box: Box) -> Observation:
        """The reward of the tests, put in now: the model never saw them. No reward file is a 0, as
        what the policy left behind may have broken them.
        """
        await box.exec(
            ["rm", "-rf", _TESTS, *_REWARDS], seconds=task.verifier_seconds, max_output=_MAX_OUTPUT
        )
        for path, data in _files(task.folder / "tests"):
            await box.put(f"{_TESTS}/{path}", data)
        command = "mkdir -p logs/verifier && bash tests/test.sh"
        ran = await box.exec(
            ["bash", "-c", command], seconds=task.verifier_seconds, max_output=_MAX_OUTPUT
        )
        info: dict[str, Any] = {"verifier_rc": ran.rc, "verifier_killed": ran.killed}
        reward = 0.0
        for path in _REWARDS:
            try:
                data = await box.get(path, 4096)
                value = json.loads(data)
            except (OSError, ValueError):
                continue
            named = value if isinstance(value, dict) else {"reward": value}
            numbers = {key: each for key, each in named.items() if _is_number(each)}
            if numbers:
                info["rewards"] = numbers
                reward = float(numbers.get("reward", sum(numbers.values()) / len(numbers)))
                break
        return Observation((), reward, terminated=True, info=info)


def read_tasks(folder: Path, image: str | None = None) -> list[HarborTask]:
    """The tasks in a folder, or the one that it is. Raises UniRLError where there is none, and for
    a task.toml that cannot be read.
    """
    found = [folder] if (folder / "task.toml").is_file() else []
    if folder.is_dir():
        found += sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise UniRLError(
            f"{folder} holds no tasks of Harbor",
            "a task is a folder with task.toml and instruction.md",
            "name the folder above them",
        )
    return [_read_task(each, image) for each in found]


def _read_task(folder: Path, image: str | None) -> HarborTask:
    try:
        about = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        if not (folder / "tests" / "test.sh").is_file():
            raise ValueError("tests/test.sh is missing")
        environment = about.get("environment", {})
        return HarborTask(
            folder.resolve(),
            instruction.strip(),
            float(about.get("agent", {}).get("timeout_sec", 600)),
            float(about.get("verifier", {}).get("timeout_sec", 600)),
            int(environment.get("memory_mb", 2048)),
            image or str(environment.get("docker_image", "host")),
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UniRLError(
            f"the task {folder} cannot be read", str(error), "correct it, or move it away"
        ) from error


def _files(folder: Path) -> list[tuple[str, bytes]]:
    """Paths below a folder with their contents; links are left out."""
    return [
        (path.relative_to(folder).as_posix(), path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

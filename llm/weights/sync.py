"""One swap of an engine's weights, whichever way they travel: write, load, forget, prove.

Source: vLLM's weight-transfer interface, with UniRL's own backend and proof behind it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import torch

from unirl.core.weights import Weights
from unirl.device import gpu_of
from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.weights.layout import MemoryLayout
from unirl.llm.weights.proof import differences, expected
from unirl.llm.weights.transfer import (
    CollectiveSender,
    CudaIpcSender,
    FileSender,
    Sender,
    SharedMemorySender,
)

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """A vLLM, in process or behind HTTP. Every call has a deadline and raises EngineFailed."""

    async def call_workers(self, method: str, arguments: list[str]) -> list[Any]:
        """Answers of all workers to a method of UniRL's extension."""

    async def introduce(self, info: dict[str, Any]) -> None:
        """What the workers must know once."""

    async def update(self, info: dict[str, Any], version: int) -> None:
        """Take new weights over, under this version."""

    async def forget(self) -> None:
        """Drop cached keys and values of the old weights."""

    async def weight_version(self) -> str:
        """The version that the engine itself reports."""

    def peer(self) -> str:
        """How errors call it."""


class WeightSync:
    """Sends whole versions of the weights to a receiver, and makes it prove that it took them."""

    def __init__(self, config: EngineConfig, receiver: Receiver) -> None:
        self._config, self._receiver = config, receiver
        self._sender: Sender | None = None
        self._workers: list[dict[str, Any]] = []
        self._introduced = self._unread_named = False

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, str(self._workers[0]["dtype"]))
        assert isinstance(found, torch.dtype)
        return found

    def meet(self, described: list[dict[str, Any]]) -> None:
        self._workers = described

    async def load(self, weights: Weights, version: int) -> None:
        """Write, load, forget, prove. Raises EngineFailed when a worker's readings differ."""
        if not weights:
            raise UniRLError(
                "an engine was sent no weights",
                "load_weights needs all of the model's parameters",
                "look at what the learner publishes",
            )
        receiver = self._receiver
        if self._sender is None or not self._introduced:
            await self._introduce(weights)
        sender = self._sender
        assert sender is not None
        info = await asyncio.to_thread(sender.write, weights, self.dtype)
        digits = info.pop("checksum")
        pushing = asyncio.create_task(asyncio.to_thread(sender.push))
        # While the workers load: neither waits for the other.
        reckoning = asyncio.create_task(asyncio.to_thread(expected, weights, version, self.dtype))
        try:
            await receiver.update(info | {"version": version}, version)
            await self._joined(pushing)
            await receiver.forget()
        except BaseException:
            # How they end matters no more.
            pushing.cancel()
            reckoning.cancel()
            raise
        wanted = await reckoning
        reports = await receiver.call_workers("unirl_proof", [str(version)])
        said = await receiver.weight_version()
        self._require(reports, said, wanted, version, digits)
        self._name_unread(reports)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
            self._introduced = False

    async def _introduce(self, weights: Weights) -> None:
        self._sender = self._sender or self._make_sender(weights)
        meeting = asyncio.create_task(asyncio.to_thread(self._sender.connect))
        await self._receiver.introduce(self._sender.introduction())
        await self._joined(meeting)
        self._introduced = True

    async def _joined(self, task: asyncio.Task[None]) -> None:
        """Until the sender has done its share of a step, too."""
        limit = self._config.timeout_seconds
        try:
            await asyncio.wait_for(task, limit)
        except (TimeoutError, RuntimeError) as error:
            raise EngineFailed(
                f"weights do not reach {self._receiver.peer()}",
                " ".join(str(error).split())[:300] or f"the deadline is {limit:g} s",
                "start the engine again",
            ) from error

    def _make_sender(self, weights: Weights) -> Sender:
        kind, limit = self._config.transfer, self._config.timeout_seconds
        device = str(self._workers[0]["device"])
        ours = next(iter(weights.values())).device
        if kind == "file":
            return FileSender(self._config.folder)
        if kind == "collective":
            # NCCL between GPUs alone: weights on the host would first need one here, which
            # may be the very one the worker computes on, and NCCL refuses to meet itself.
            meets = ours if device == "cuda" and ours.type == "cuda" else torch.device("cpu")
            return CollectiveSender(len(self._workers), meets, limit)
        # By its name: another process may know another GPU under the same number.
        is_same = bool(gpu := gpu_of(ours)) and [one["gpu"] for one in self._workers] == [gpu]
        num_bytes = MemoryLayout.of(weights, self.dtype).num_bytes if is_same else 0
        if is_same and num_bytes <= CudaIpcSender.MOST_BYTES:
            return CudaIpcSender(ours)
        return SharedMemorySender()

    def _name_unread(self, reports: list[dict[str, Any]]) -> None:
        """Say once which tensors are known to have arrived and no more."""
        read = [{name for _, name, _ in report["computed"]} for report in reports]
        unread = set(reports[0]["received"]) - set.intersection(*read)
        if unread and not self._unread_named:
            level = logging.INFO if self._config.probe_versions else logging.WARNING
            log.log(
                level,
                "%s: that it computes with %d tensors is not read back, such as %s; only "
                "log-probabilities show it (engine.probe_versions is %d)",
                self._receiver.peer(),
                len(unread),
                min(unread),
                self._config.probe_versions,
            )
        self._unread_named = True

    def _require(
        self,
        reports: list[dict[str, Any]],
        said: str,
        wanted: dict[str, str],
        version: int,
        digits: str,
    ) -> None:
        peer = self._receiver.peer()
        if not reports:
            raise EngineFailed(
                f"{peer} has no workers that answer", "a swap must be proven", "start it again"
            )
        if said != str(version):
            raise EngineFailed(
                f"{peer} did not take the new weights",
                f"it must be at version {version}, it says {said}",
                "start the engine again",
            )
        for index, report in enumerate(reports):
            if report["version"] != version:
                wrong = f"it is at version {report['version']}, not {version}"
            elif report["checksum"] != digits:
                wrong = f"what arrived has checksum {report['checksum']}, not {digits}"
            else:
                wrong = differences(wanted, report["computed"], report["received"])
            if wrong:
                raise EngineFailed(
                    f"worker {index} of {peer} does not compute with the weights it was sent",
                    wrong,
                    "start the engine again; without eager it may keep compiled copies",
                )

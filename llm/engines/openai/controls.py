"""What servers offer beyond completions: taking new weights.

Source: vLLM's development endpoints (VLLM_SERVER_DEV_MODE=1), SGLang's update_weights_from_disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.engines.openai.http import HttpClient
from unirl.llm.http import BadStatus, HttpFailed
from unirl.llm.weights.swap import SwapTimes
from unirl.llm.weights.sync import WeightSync
from unirl.llm.weights.transfer import import_safetensors

log = logging.getLogger(__name__)

_DESCRIBE = "unirl_describe"
_NO_ENDPOINT = frozenset({404, 405, 501})
"""Statuses of a server that has no such endpoint; all others are of one that failed just now."""
_UNDO_SECONDS = 10.0
"""For setting a server going again whose swap failed: it may hang, and the failure waits."""
_PATIENCE = 0.25
"""Share of engine.timeout_seconds after which a pause is taken for one that nobody will end; until
then it may be another client's swap.
"""


class Controls(Protocol):
    """How a kind of server takes weights."""

    async def load(self, weights: Weights, version: int) -> None:
        """Take them over, and prove it as far as the server can."""

    def stats(self) -> Mapping[str, float]:
        """Of swaps."""

    def close(self) -> None:
        """Let go of memory and files; idempotent."""


async def find_controls(
    http: HttpClient, config: EngineConfig, model: str, folder: str
) -> Controls | None:
    """What this server offers; None: nothing. One that a swap left paused is set going.

    Raises BadStatus and EngineFailed where it does not say what it offers.
    """
    root = http.root()
    told = await _told(root, "/is_paused")
    if told is not None:
        vllm = VllmControls(root, config, folder)
        if await _stays_paused(root, told, config.timeout_seconds * _PATIENCE):
            log.warning("%s is paused, by a swap that never ended: it goes on", vllm.peer())
            await vllm.revive()
        return vllm if await vllm.ready() else None
    if await _told(root, "/get_model_info") is not None:
        return SglangControls(root, model, folder)
    return None


class VllmControls:
    """vLLM with VLLM_SERVER_DEV_MODE=1 and UniRL's extension in its workers; a Receiver."""

    def __init__(self, http: HttpClient, config: EngineConfig, folder: str = "") -> None:
        self._http = http
        self._sync = WeightSync(config, self, folder)

    async def ready(self) -> bool:
        """Whether its workers have the extension. Raises as `find_controls` does."""
        asked = {"method": _DESCRIBE, "args": []}
        try:
            answer = await self._http.order("/collective_rpc", asked)
        except BadStatus as error:
            # Workers without the extension fail as all that fails in them does, but by its name.
            if error.status in _NO_ENDPOINT or _DESCRIBE in error.body:
                return False
            raise
        self._sync.meet(_results(answer))
        return True

    async def load(self, weights: Weights, version: int) -> None:
        """See Controls. Requests of others end: they would go on under weights half loaded."""
        self._sync.times.begin()
        undo = self._resume
        try:
            with self._sync.times.part("pause"):
                await self._order("/pause?mode=abort&clear_cache=false")
            undo = self.revive
            await self._sync.load(weights, version)
        except BaseException:
            # Others may use it, and whoever comes next would wait for its first token for ever.
            with contextlib.suppress(HttpFailed, EngineFailed, TimeoutError):
                async with asyncio.timeout(_UNDO_SECONDS):
                    await undo()
            raise
        with self._sync.times.part("resume"):
            await self._resume()
        self._sync.times.end()

    async def revive(self) -> None:
        """Set a server going that a broken swap left paused. Its weights may be anything."""
        # A model that waits for weights ends the server with its first token. To begin an update
        # fails where one is open, and does no harm where one broke off; then there is one to end.
        for path in ("/start_weight_update", "/finish_weight_update"):
            with contextlib.suppress(BadStatus):
                await self._http.order(path)
        await self._resume()

    async def _resume(self) -> None:
        await self._order("/resume")

    async def call_workers(self, method: str, arguments: list[str]) -> list[Any]:
        """See Receiver."""
        asked = {"method": method, "args": arguments}
        return _results(await self._order("/collective_rpc", asked))

    async def introduce(self, told: dict[str, Any]) -> None:
        """See Receiver."""
        await self._order("/init_weight_transfer_engine", {"init_info": told})

    async def update(self, told: dict[str, Any], version: int) -> None:
        """See Receiver."""
        await self._order("/start_weight_update")
        await self._order("/update_weights", {"update_info": told})
        await self._order("/finish_weight_update", {"weight_version": str(version)})

    async def forget(self) -> None:
        """See Receiver."""
        await self._order("/reset_prefix_cache")

    async def weight_version(self) -> str:
        """See Receiver."""
        return str((await self._http.get("/weight_info") or {}).get("weight_version"))

    def peer(self) -> str:
        """See Receiver."""
        return f"the vLLM at {self._http.url}"

    def stats(self) -> Mapping[str, float]:
        """See Controls."""
        return self._sync.times.as_stats()

    def close(self) -> None:
        """See Controls."""
        self._sync.close()

    async def _order(self, path: str, body: Any = None) -> Any:
        try:
            return await self._http.order(path, body)
        except BadStatus as error:
            if error.status < 500:
                raise
            raise EngineFailed(
                f"{self.peer()} failed at {path}", error.body or "no reason given", "see its log"
            ) from error


class SglangControls:
    """SGLang: a folder in Hugging Face's layout that both sides can read, loaded by its path.

    It reports versions, but no checksums: what is proven is that it says it has loaded the version.
    """

    def __init__(self, http: HttpClient, model: str, folder: str = "") -> None:
        self._http, self._model = http, model
        self._own = not folder
        self._folder = Path(folder or tempfile.mkdtemp(prefix="unirl-weights-"))
        self._last: Path | None = None
        self._times = SwapTimes()

    async def load(self, weights: Weights, version: int) -> None:
        """See Controls."""
        self._times.begin()
        with self._times.part("write"):
            path = await asyncio.to_thread(self._write, weights, version)
        with self._times.part("load"):
            told = {
                "model_path": str(path),
                "weight_version": str(version),
                "abort_all_requests": True,
                "flush_cache": True,
            }
            answer = await self._http.order("/update_weights_from_disk", told)
        if not (answer or {}).get("success"):
            raise EngineFailed(
                f"the SGLang at {self._http.url} did not take the new weights",
                str((answer or {}).get("message", "it gives no reason")),
                "it must be able to read the folder that they are written to",
            )
        with self._times.part("proof"):
            said = str((await self._http.get("/get_model_info")).get("weight_version", version))
        if said != str(version):
            raise EngineFailed(
                f"the SGLang at {self._http.url} did not take the new weights",
                f"it must be at version {version}, it says {said}",
                "look at its log",
            )
        self._times.end()

    def stats(self) -> Mapping[str, float]:
        """See Controls."""
        return self._times.as_stats()

    def close(self) -> None:
        """See Controls."""
        shutil.rmtree(self._folder if self._own else self._last or "", ignore_errors=True)

    def _write(self, weights: Weights, version: int) -> Path:
        """The model's folder with other weights in it."""
        source = Path(self._model)
        if not (source / "config.json").is_file():
            raise UniRLError(
                f"{self._model} is no folder",
                "weights for SGLang are written beside a copy of the model's settings",
                "serve the model from a folder that UniRL can read as well, under its path",
            )
        path = self._folder / f"weights-{os.getpid()}-{version}"
        path.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in file.name:
                shutil.copy(file, path)
        flat = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        import_safetensors().torch.save_file(
            flat, str(path / "model.safetensors"), metadata={"format": "pt"}
        )
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = path
        return path


async def _told(http: HttpClient, path: str) -> dict[str, Any] | None:
    """What an endpoint says; None where there is none."""
    try:
        told = await http.get(path)
    except BadStatus as error:
        if error.status in _NO_ENDPOINT:
            return None
        raise
    return told if isinstance(told, dict) else {}


async def _stays_paused(http: HttpClient, told: dict[str, Any], seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while told.get("is_paused"):
        if loop.time() >= end:
            return True
        await asyncio.sleep(0.2)
        told = await _told(http, "/is_paused") or {}
    return False


def _results(answer: Any) -> list[Any]:
    return list((answer or {}).get("results", []))

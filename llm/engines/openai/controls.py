"""What servers offer beyond completions: taking new weights.

Source: vLLM's development endpoints (VLLM_SERVER_DEV_MODE=1), SGLang's update_weights_from_disk,
engine hf's own (unirl.llm.engines.hf.server).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.http import BadStatus, HttpClient, HttpFailed
from unirl.llm.models.checksum import digits
from unirl.llm.packages import needs
from unirl.llm.weights.own_folder import OwnFolder
from unirl.llm.weights.probe import precision_of
from unirl.llm.weights.sync import WeightSync
from unirl.llm.weights.transfer import save_tensors

log = logging.getLogger(__name__)

_DESCRIBE = "unirl_describe"
_NO_ENDPOINT = frozenset({404, 405, 501})
"""Statuses of a server that has no such endpoint; all others are of one that failed just now."""
_UNDO_SECONDS = 10.0
"""For resuming a server whose swap failed: it may hang, and the failure waits."""
_PATIENCE = 0.25
"""Share of engine.timeout_seconds after which a pause is taken for one that never ends; until
then it may be another client's swap.
"""


async def find_controls(http: HttpClient, config: EngineConfig, model: str) -> Controls | None:
    """What this server offers; None: nothing. One that a swap left paused is resumed.

    Raises BadStatus and EngineFailed where it does not say what it offers.
    """
    root = http.root()
    state = await _described(root, "/is_paused")
    if state is not None:
        vllm = VllmControls(root, config)
        if await _stays_paused(root, state, config.timeout_seconds * _PATIENCE):
            log.warning("%s is paused, by a swap that never ended: it is resumed", vllm.peer())
            await vllm.revive()
        return vllm if await vllm.has_extension() else None
    if await _described(root, "/get_model_info") is not None:
        return SglangControls(root, model, config.folder)
    if (about := await _described(root, "/unirl/engine")) is not None:
        return HfControls(root, str(about.get("dtype")))
    return None


class VllmControls:
    """vLLM with VLLM_SERVER_DEV_MODE=1 and UniRL's extension in its workers; a Receiver."""

    def __init__(self, http: HttpClient, config: EngineConfig) -> None:
        self._http = http
        self._sync = WeightSync(config, self)

    async def has_extension(self) -> bool:
        """Whether its workers have it. Raises as `find_controls` does."""
        call = {"method": _DESCRIBE, "args": []}
        try:
            answer = await self._http.post_json("/collective_rpc", call, once=True)
        except BadStatus as error:
            # Workers without the extension fail as all that fails in them does, but by its name.
            if error.status in _NO_ENDPOINT or _DESCRIBE in error.body:
                return False
            raise
        self._sync.meet(_results(answer))
        return True

    async def load(self, weights: Weights, version: int) -> None:
        """Requests of others end: they would continue under weights half loaded."""
        undo: Callable[[], Awaitable[None]] = partial(self._order, "/resume", once=False)
        try:
            await self._order("/pause?mode=abort&clear_cache=false", once=False)
            undo = self.revive
            await self._sync.load(weights, version)
        except BaseException:
            # Others may use it, and the next request would wait for its first token for ever.
            with contextlib.suppress(HttpFailed, EngineFailed, TimeoutError):
                async with asyncio.timeout(_UNDO_SECONDS):
                    await undo()
            raise
        await self._order("/resume", once=False)

    async def revive(self) -> None:
        """Resume a server that a broken swap left paused. Its weights may be anything."""
        # A model that waits for weights ends the server with its first token. To begin an update
        # fails where one is open, and does no harm where one broke off; then there is one to end.
        for path in ("/start_weight_update", "/finish_weight_update"):
            with contextlib.suppress(BadStatus):
                await self._http.post_json(path, once=True)
        await self._order("/resume", once=False)

    async def call_workers(self, method: str, arguments: list[str]) -> list[Any]:
        call = {"method": method, "args": arguments}
        return _results(await self._order("/collective_rpc", call, once=False))

    async def introduce(self, info: dict[str, Any]) -> None:
        await self._order("/init_weight_transfer_engine", {"init_info": info})

    async def update(self, info: dict[str, Any], version: int) -> None:
        await self._order("/start_weight_update")
        await self._order("/update_weights", {"update_info": info})
        await self._order("/finish_weight_update", {"weight_version": str(version)})

    async def forget(self) -> None:
        await self._order("/reset_prefix_cache", once=False)

    async def weight_version(self) -> str:
        return str((await self._http.get_json("/weight_info") or {}).get("weight_version"))

    def peer(self) -> str:
        return f"the vLLM at {self._http.url}"

    def precision(self, config: EngineConfig) -> str:
        return precision_of(self._sync.dtype)

    def close(self) -> None:
        self._sync.close()

    async def _order(self, path: str, body: Any = None, *, once: bool = True) -> Any:
        """once: False where a second time changes nothing more."""
        try:
            return await self._http.post_json(path, body, once=once)
        except BadStatus as error:
            if error.status < 500:
                raise
            raise EngineFailed(
                f"{self.peer()} failed at {path}", error.body or "no reason given", "see its log"
            ) from error


class SglangControls:
    """SGLang: a folder in Hugging Face's layout that both sides can read, loaded by its path.

    It reports versions, but no checksums: what it computes with shows in log-probabilities alone.
    """

    def __init__(self, http: HttpClient, model: str, folder: str) -> None:
        self._http, self._model = http, model
        self._folder = OwnFolder("weights", folder)

    async def load(self, weights: Weights, version: int) -> None:
        path = await asyncio.to_thread(self._write, weights, version)
        order = {
            "model_path": str(path),
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": True,
        }
        answer = await self._http.post_json("/update_weights_from_disk", order, once=True) or {}
        if not answer.get("success"):
            raise EngineFailed(
                f"{self.peer()} did not take the new weights",
                str(answer.get("message", "it gives no reason")),
                "it must be able to read the folder that they are written to",
            )
        info = await self._http.get_json("/get_model_info")
        said = str(info.get("weight_version", version))
        if said != str(version):
            raise EngineFailed(
                f"{self.peer()} did not take the new weights",
                f"it must be at version {version}, it says {said}",
                "look at its log",
            )

    def peer(self) -> str:
        return f"the SGLang at {self._http.url}"

    def precision(self, config: EngineConfig) -> str:
        """It does not tell its own."""
        return "float32" if config.dtype == "float32" else "bfloat16"

    def close(self) -> None:
        self._folder.remove()

    def _write(self, weights: Weights, version: int) -> Path:
        source = Path(self._model)
        if not (source / "config.json").is_file():
            raise UniRLError(
                f"{self._model} is no folder",
                "weights for SGLang are written beside a copy of the model's settings",
                "serve the model from a folder that UniRL can read as well, under its path",
            )
        path = self._folder.path() / f"weights-{version}"
        path.mkdir(exist_ok=True)
        for file in source.iterdir():
            if file.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in file.name:
                shutil.copy(file, path)
        flat = {name: value.detach().cpu() for name, value in weights.items()}
        save_tensors(flat, path / "model.safetensors", format="pt")
        self._folder.keep_only(path)
        return path


class HfControls:
    """Engine hf behind HTTP: weights are the body of a request, in what it computes with."""

    def __init__(self, http: HttpClient, dtype: str) -> None:
        self._http, self._dtype = http, getattr(torch, dtype, torch.float32)

    async def load(self, weights: Weights, version: int) -> None:
        wanted = await asyncio.to_thread(digits, weights, self._dtype)
        # Another client of the same run may have brought them.
        about = await self._http.get_json("/unirl/engine")
        if not _holds(about, version, wanted):
            data = await asyncio.to_thread(self._packed, weights)
            # A second time changes nothing more.
            about = await self._http.post_json(f"/unirl/weights?version={version}", data)
        if not _holds(about, version, wanted):
            raise EngineFailed(
                f"{self.peer()} did not take the new weights",
                f"it must be at version {version} with checksum {wanted}, it says {about}",
                "start it again; if it happens again, test the memory of its machine",
            )

    def peer(self) -> str:
        return f"the engine at {self._http.url}"

    def precision(self, config: EngineConfig) -> str:
        return precision_of(self._dtype)

    def close(self) -> None:
        """Nothing is held."""

    def _packed(self, weights: Weights) -> bytes:
        with needs("safetensors", "weights travel as safetensors"):
            from safetensors.torch import save
        flat = {
            name: value.detach().to(
                "cpu", self._dtype if value.is_floating_point() else value.dtype
            )
            for name, value in weights.items()
        }
        return save({name: value.contiguous() for name, value in flat.items()})


Controls: TypeAlias = VllmControls | SglangControls | HfControls


def _holds(about: Any, version: int, checksum: str) -> bool:
    said = about if isinstance(about, dict) else {}
    return (said.get("version"), said.get("checksum")) == (version, checksum)


async def _described(http: HttpClient, path: str) -> dict[str, Any] | None:
    try:
        described = await http.get_json(path)
    except BadStatus as error:
        if error.status in _NO_ENDPOINT:
            return None
        raise
    return described if isinstance(described, dict) else {}


async def _stays_paused(http: HttpClient, state: dict[str, Any], seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while state.get("is_paused"):
        if loop.time() >= end:
            return True
        await asyncio.sleep(0.2)
        state = await _described(http, "/is_paused") or {}
    return False


def _results(answer: Any) -> list[Any]:
    return list((answer or {}).get("results", []))

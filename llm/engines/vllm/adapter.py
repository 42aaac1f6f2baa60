"""Only the adapter travels: a folder in peft's layout per version, which vLLM's workers load.

Source: peft's adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import EngineFailed
from unirl.llm.models.lora import PREFIX
from unirl.llm.weights.own_folder import OwnFolder
from unirl.llm.weights.proof import unnamed_reading
from unirl.llm.weights.transfer import save_tensors

ADAPTER_NAME, ADAPTER_ID = "unirl", 1


class AdapterFolder:
    """Writes adapters, and knows what a worker must hold after loading one.

    alpha: adapters are scaled by alpha / rank. folder: see OwnFolder.
    """

    def __init__(self, alpha: float, folder: str) -> None:
        self._alpha = alpha
        self._folder = OwnFolder("adapter", folder)
        self._wanted: dict[str, set[str]] = {}

    def write(self, weights: Weights, version: int, dtype: torch.dtype) -> Path:
        """The folder of this version: a new one each time, for vLLM's caches go by the path.

        weights: lora_A [r, K] and lora_B [N, r] by peft's names, with or without the name of the
        adapter in them. Raises UniRLError when there are none.
        """
        tensors = {_peft_name(name): value for name, value in weights.items() if ".lora_" in name}
        if not tensors:
            raise UniRLError(
                "engine.transfer is lora, and no adapter came",
                f"of {len(weights)} tensors none is called lora_A or lora_B",
                "set model.lora_rank above 0, or engine.transfer to shared",
            )
        rank = int(next(v.shape[0] for n, v in tensors.items() if n.endswith(".lora_A.weight")))
        settings: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "r": rank,
            "lora_alpha": self._alpha,
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        }
        flat = {name: value.detach().to("cpu", dtype) for name, value in tensors.items()}
        path = self._folder.path() / f"adapter-{version}"
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(settings, indent=1))
        save_tensors(flat, path / "adapter_model.safetensors")
        self._folder.keep_only(path)
        # vLLM multiplies B by alpha / r when it loads it.
        scale = self._alpha / rank
        self._wanted = {
            name: {unnamed_reading(value), unnamed_reading(value * scale)}
            for name, value in flat.items()
        }
        return path

    def require(self, reports: Sequence[Mapping[str, Sequence[str]]], peer: str) -> None:
        """EngineFailed unless every worker holds all of this adapter, and nothing else."""
        for index, report in enumerate(reports):
            found = {one for readings in report.values() for one in readings}
            known = {one for pair in self._wanted.values() for one in pair}
            lost = [name for name, pair in self._wanted.items() if not pair & found]
            if lost or not found <= known:
                raise EngineFailed(
                    f"worker {index} of {peer} does not compute with the adapter it was sent",
                    f"{len(lost)} of {len(self._wanted)} tensors are not there"
                    + (f", such as {lost[0]}" if lost else f", {len(found - known)} are unknown"),
                    "give adapters to linear layers only, or set engine.transfer to shared",
                )

    def close(self) -> None:
        self._folder.remove()


def _peft_name(name: str) -> str:
    """base_model.model.<layer>.lora_A.weight, without the adapter's own name."""
    before, dot, after = name.partition(".lora_")
    kind = after[0]
    clean = before if before.startswith(PREFIX) else PREFIX + before
    return f"{clean}{dot}{kind}.weight"

"""policy.json: what an exported policy reads and does, for programs that run it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from unirl.action_space import parts
from unirl.export.act import ActFunction, Port
from unirl.export.policy import ExportedPolicy
from unirl.policy.inputs import ObservationInputs
from unirl.policy.normalize import RunningNorm
from unirl.policy.own.inputs import OwnInputs

FILE = "policy.json"
FORMAT = 1
"""Version of this file's layout."""


def write_description(trained: ExportedPolicy, function: ActFunction, folder: Path) -> None:
    """Inputs and outputs by name, in order; how inputs are processed; what an action consists of;
    the networks, whose weights policy.safetensors holds by these names.
    """
    config = dataclasses.asdict(trained.policy.config)
    text = {
        "format": FORMAT,
        "inputs": [_port(port) for port in function.inputs],
        "outputs": [_port(port) for port in function.outputs],
        "processing": _processing(trained.policy.inputs),
        "actions": _actions(trained.action_space, ()),
        "observation_space": str(trained.observation_space),
        "action_space": str(trained.action_space),
        "networks": config,
    }
    (folder / FILE).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _port(port: Port) -> dict[str, Any]:
    return {**dataclasses.asdict(port), "shape": ["batch", *port.shape]}


def _processing(inputs: ObservationInputs | OwnInputs) -> dict[str, Any]:
    """In the order in which networks get them: images, each by a network of its own, and one vector
    of all else. A network of the user's own gets them as they are, floats normalized.
    """
    if isinstance(inputs, OwnInputs):
        return {"own": True, "normalizer": _normalizer(inputs.norm)}
    names = [name for name, _ in inputs.named_buffers()]
    images = [
        {
            "input": "/".join(image.path) or "obs",
            "axes": image.layout,
            "scale": image.scale,
            "whitened": image.whitened,
            "blocks": image.blocked,
        }
        for image in inputs.images
    ]
    vector: list[dict[str, Any]] = [
        {
            "input": "/".join(leaf.path) or "obs",
            "scale": leaf.scale,
            "normalized": leaf.normalized and inputs.norm is not None,
        }
        for leaf in inputs.floats
    ]
    indices: Any = inputs.indices
    vector += [
        {
            "input": "/".join(leaf.path) or "obs",
            "as": "one-hot" if leaf.table is None else "embedding",
            "num_values": leaf.num_values,
        }
        for leaf in indices
    ]
    statistics = [f"inputs.{name}" for name in names if "pixel_norms" in name]
    return {
        "images": images,
        "vector": vector,
        "normalizer": _normalizer(inputs.norm),
        "image_statistics": statistics,
    }


def _normalizer(norm: RunningNorm | None) -> dict[str, Any] | None:
    if norm is None:
        return None
    return {
        "mean": "inputs.norm.mean",
        "variance": "inputs.norm.var",
        "epsilon": norm.epsilon,
        "clip": norm.clip,
        "formula": "clip((x - mean) / sqrt(variance + epsilon), -clip, clip)",
    }


def _actions(space: Space[Any], path: tuple[str, ...]) -> list[dict[str, Any]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return [found for name, part in parts(space) for found in _actions(part, (*path, name))]
    about: dict[str, Any] = {"path": path, "space": type(space).__name__}
    if isinstance(space, spaces.Box):
        about |= {"low": _finite(space.low), "high": _finite(space.high)}
    elif isinstance(space, spaces.MultiBinary):
        about["shape"] = space.shape
    elif isinstance(space, spaces.Discrete):
        about |= {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, spaces.MultiDiscrete):
        about |= {"n": space.nvec.tolist(), "start": space.start.tolist()}
    return [about]


def _finite(bounds: np.ndarray[Any, Any]) -> Any:
    """None where there is no bound: JSON has no infinity."""
    return np.where(np.isfinite(bounds), bounds, np.array(None)).tolist()

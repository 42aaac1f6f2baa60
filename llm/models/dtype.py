"""What number format a model computes in: the rule of unirl.policy.precision, for models."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from unirl.device import device_name
from unirl.errors import UniRLError
from unirl.llm.models.model import TINY, ModelConfig, ModelDtype, source_of
from unirl.llm.models.transformers import import_transformers
from unirl.policy.precision import emulated, fast_dtype, has_bfloat16

log = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_SHORT = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def settle_dtype(config: ModelConfig, *devices: str) -> tuple[ModelDtype, str]:
    """`model.dtype` decided for the devices that generate and learn, and why, for people.

    A recipe decides once, when its plan is made: the run's folder says what it was, so that
    `unirl resume` continues in it wherever it runs.
    """
    native = fast_dtype(*devices)
    if config.dtype == "bfloat16" and native == "float32":
        where = next(device for device in devices if not has_bfloat16(device))
        return config.dtype, (
            f"bfloat16, which {where} can only emulate, many times slower than float32; "
            "auto decides by the device"
        )
    if config.dtype != "auto":
        return config.dtype, config.dtype
    says = torch.float32 if config.path == TINY else _stored(config)
    if says in _HALF:
        return native, f"{native}: its folder says {_SHORT[says]}, and " + (
            "the devices multiply bfloat16" if native == "bfloat16" else "bfloat16 is emulated here"
        )
    if says == torch.float32:
        return "float32", "float32" if config.path == TINY else "float32, as its folder says"
    return "auto", "as its folder says"  # nothing, or what no setting names


def for_evaluation(config: ModelConfig, device: str) -> ModelConfig:
    """The config for generating on a device alone: float32 where bfloat16 would be emulated.
    Weights of either load.
    """
    emulates = config.dtype == "bfloat16" and not has_bfloat16(device_name(device))
    return replace(config, dtype="float32") if emulates else config


def warn_if_emulated(model: Any, who: str, setting: str) -> None:
    """Log a warning where a loaded model computes in bfloat16 that is emulated."""
    weight = next(model.parameters())
    if weight.dtype == torch.bfloat16 and not has_bfloat16(weight.device):
        log.warning(emulated(who, weight.device, setting))


def _stored(config: ModelConfig) -> torch.dtype | None:
    """What the folder says that its weights are; None: nothing, or it cannot be read."""
    try:
        transformers = import_transformers()
        settings = transformers.AutoConfig.from_pretrained(config.path, **source_of(config))
    except (OSError, ValueError, KeyError, UniRLError):
        return None  # loading the model finds what is wrong with it, and says it better
    found = getattr(settings.get_text_config(), "dtype", None) or getattr(settings, "dtype", None)
    return found if isinstance(found, torch.dtype) else None

"""What number format policies and models compute in: bfloat16 only where the hardware multiplies
it, decided once for a run, unless it is asked for by name.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch

from unirl.policy.config import PolicyConfig

log = logging.getLogger(__name__)

_CPU_FLAGS = ("avx512_bf16", "amx_bf16", "sve_bf16", "bf16")


def has_bfloat16(device: torch.device | str) -> bool:
    """Whether the device is there and has instructions for bfloat16 products. Where it has none
    they are emulated: on a CPU with AVX2 alone a convolution of the Nature CNN took eight times as
    long as in float32 (tests/policy/test_precision.py).
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:  # no device at all: computing there fails with an error that says so
        return False
    if kind == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # Not in every torch that is supported; then there is a question for the one flag.
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    found = capabilities()
    return any(found.get(flag, False) for flag in _CPU_FLAGS)


def settle_dtype(config: PolicyConfig, *devices: torch.device | str) -> PolicyConfig:
    """The config with compute_dtype "auto" decided for the devices that act and learn.

    A recipe decides once, when its plan is made: the run's folder and checkpoints say what it was,
    so `unirl resume` keeps it wherever it runs.
    """
    if config.compute_dtype != "auto":
        return config
    if config.module:  # what a user wrote reads float32
        return replace(config, compute_dtype="float32")
    return replace(config, compute_dtype=fast_dtype(*devices))


def fast_dtype(*devices: torch.device | str) -> Literal["float32", "bfloat16"]:
    """What all of these devices multiply natively."""
    return "bfloat16" if all(has_bfloat16(device) for device in devices) else "float32"


def for_cpu(config: PolicyConfig) -> PolicyConfig:
    """The config for acting on the CPU alone: float32 where bfloat16 would be emulated. Weights of
    either load.
    """
    if config.compute_dtype == "bfloat16" and not has_bfloat16("cpu"):
        return replace(config, compute_dtype="float32")
    return config


def warn_if_emulated(config: PolicyConfig, device: torch.device | str, who: str) -> None:
    """Log a warning where bfloat16 that was asked for by name is emulated. who: what computes."""
    if config.compute_dtype == "bfloat16" and not has_bfloat16(device):
        log.warning(emulated(who, device, "policy.compute_dtype"))


def emulated(who: str, device: torch.device | str, setting: str) -> str:
    """What to say of one that computes in bfloat16 where it is emulated."""
    return (
        f"{who} computes in bfloat16, which {device} can only emulate, many times slower than"
        f" float32: in a new run, {setting} auto decides by the device"
    )

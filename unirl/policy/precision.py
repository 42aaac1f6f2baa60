"""What number format a policy computes in: bfloat16 only where the hardware multiplies it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from unirl.policy.config import PolicyConfig

log = logging.getLogger(__name__)


def has_bfloat16(device: torch.device | str) -> bool:
    """Whether the device has instructions for bfloat16 products. Where it has none they are
    emulated: on a CPU with AVX2 convolutions took ten times as long as in float32.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:  # no device at all; the learner says so in its own words
        return False
    if kind == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu":
        return False
    # torch 2.11 may not have it; there AVX-512 has to do as a sign.
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    found = capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "sve_bf16", "bf16"))


def settle_dtype(config: PolicyConfig, *devices: torch.device | str) -> PolicyConfig:
    """The config with compute_dtype "auto" decided for the devices that act and learn.

    A recipe decides once, so that a run and its checkpoints keep one format wherever they are
    resumed. bfloat16 that was asked for by name stays, with a warning where it is emulated.
    """
    if config.compute_dtype == "float32":
        return config
    emulated = [str(device) for device in devices if not has_bfloat16(device)]
    if config.compute_dtype == "auto":
        return replace(config, compute_dtype="float32" if emulated else "bfloat16")
    if emulated:
        log.warning(
            "policy.compute_dtype is bfloat16, which %s can only emulate, many times slower than"
            " float32; auto decides by the device",
            " and ".join(dict.fromkeys(emulated)),
        )
    return config

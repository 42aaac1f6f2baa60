"""What one machine has: found where it is called, and made of what JSON can say."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from unirl.host import available_memory, total_memory, usable_cores

PACKAGES = ("unirl", "torch", "numpy", "gymnasium", "ray", "vllm", "transformers")
_TIME_ERROR = 5
"""What adjtimex says of a clock that nothing sets; source: man 2 adjtimex."""


def node_facts(folder: str = ".") -> dict[str, Any]:
    """All of it. folder: where run folders are, or will be."""
    return {
        "node": socket.gethostname(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cores": _cores(),
        "memory": _memory(),
        "limits": _limits(),
        "gpu": _gpus(),
        "cpu_multiplies": _cpu_dtypes(),
        "disk": _disk(Path(folder)),
        "clock": {"time": time.time(), "is_synchronized": _is_synchronized()},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "a checkout" if name == "unirl" else None


def _cores() -> dict[str, Any]:
    return {"usable": usable_cores(), "machine": os.cpu_count(), "quota": _cpu_quota()}


def _cpu_quota() -> float | None:
    """Cores' worth of time that the cgroup allows; None: no limit is seen."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        allowed = int((folder / "cpu.cfs_quota_us").read_text())
        return allowed / int((folder / "cpu.cfs_period_us").read_text()) if allowed > 0 else None
    return None


def _memory() -> dict[str, Any]:
    total, whose = total_memory()
    found = {"total": total, "available": available_memory()[0], "limited_by": whose}
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        found |= {"shm_total": usage.total, "shm_free": usage.free}
    return found


def _limits() -> dict[str, Any]:
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    pids = {}
    for name in ("max", "current"):
        with suppress(OSError, ValueError):
            pids[name] = int(Path(f"/sys/fs/cgroup/pids.{name}").read_text())
    return {
        "open_files": None if files == resource.RLIM_INFINITY else files,
        "open_files_hard": None if most_files == resource.RLIM_INFINITY else most_files,
        "processes": None if processes == resource.RLIM_INFINITY else processes,
        "cgroup_pids": pids.get("max"),
        "cgroup_pids_used": pids.get("current"),
    }


def _gpus() -> dict[str, Any]:
    """torch's view, and the driver's."""
    import torch

    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    found: dict[str, Any] = {
        "torch_cuda": torch.version.cuda,
        "driver_cuda": _driver_cuda(),
        "has_device_files": has_device,
        "devices": [],
        "without_peer_access": [],
        "error": None,
    }
    try:
        for index in range(torch.cuda.device_count()):
            shown = torch.cuda.get_device_properties(index)
            found["devices"].append({"name": shown.name, "memory": shown.total_memory})
        number = len(found["devices"])
        found["without_peer_access"] = [
            [a, b]
            for a in range(number)
            for b in range(number)
            if a != b and not torch.cuda.can_device_access_peer(a, b)
        ]
    except RuntimeError as error:
        found["error"] = str(error).partition("\n")[0]
    return found


def _driver_cuda() -> str | None:
    """The newest CUDA that the installed driver can run."""
    with suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return None


def _cpu_dtypes() -> list[str]:
    from unirl.policy.precision import has_bfloat16

    return ["float32", *(["bfloat16"] if has_bfloat16("cpu") else [])]


def _disk(folder: Path) -> dict[str, Any]:
    """Of the folder, or of the nearest one above that exists."""
    folder = folder.resolve()
    while not folder.is_dir():
        folder = folder.parent
    found: dict[str, Any] = {"folder": str(folder), "free": 0, "fsync_ms": None, "error": None}
    try:
        found["free"] = shutil.disk_usage(folder).free
        seconds = []
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(5):
                file.write(bytes(2**20))
                file.flush()
                started = time.perf_counter()
                os.fsync(file.fileno())
                seconds.append(time.perf_counter() - started)
        found["fsync_ms"] = round(1e3 * statistics.median(seconds), 2)
    except OSError as error:
        found["error"] = error.strerror
    return found


def _is_synchronized() -> bool | None:
    """Whether something (ntp, chrony, the hypervisor) sets this clock; None: nobody knows."""
    with suppress(OSError, AttributeError):
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
        return None if state < 0 else state != _TIME_ERROR
    return None

"""What the facts of a machine mean for a run: a line for each subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
_PROCESS_BYTES = 250 * 2**20
"""What an actor process takes, torch included; docs/metrics.md says how memory is counted."""
_FILES_PER_PROCESS = 16
_TORCH = ((2, 11), (2, 14))
"""From the first on, below the second: as in pyproject.toml."""


@dataclass(frozen=True)
class Needs:
    """What a plan asks of the machine that runs it."""

    slot_bytes: int = 0
    num_processes: int = 0
    what: str = "a run"


@dataclass(frozen=True)
class Finding:
    """One line: what was found, and the remedy where it would hold a run back."""

    subject: str
    found: str
    is_problem: bool = False
    remedy: str = ""
    """What to do; without a problem a hint, if there is one."""


def judge(facts: Mapping[str, Any], needs: Needs) -> list[Finding]:
    """Every subject of one machine, in the order in which it is shown."""
    return [
        *_versions(facts),
        *_cores(facts["cores"]),
        *_memory(facts["memory"], needs),
        _shared(facts["memory"], facts),
        *_limits(facts["limits"], facts["cores"]["usable"], needs),
        *_gpus(facts["gpu"]),
        _arithmetic(facts["cpu_multiplies"]),
        _disk(facts["disk"]),
        _clock(facts["clock"]),
    ]


def _versions(facts: Mapping[str, Any]) -> list[Finding]:
    python = _numbers(facts["python"])
    is_old = python < (3, 11) or python >= (3, 13)
    found = [
        Finding("python", facts["python"], is_old, "UniRL needs 3.11 or 3.12" if is_old else "")
    ]
    for name, version in facts["packages"].items():
        if name == "torch" and version is not None:
            is_bad = not _TORCH[0] <= _numbers(version) < _TORCH[1]
            remedy = "pip install 'torch>=2.11,<2.14'" if is_bad else ""
            found.append(Finding(name, version, is_bad, remedy))
        elif version is not None or name in ("ray", "vllm"):
            found.append(Finding(name, version or "not installed"))
        else:
            is_needed = name in ("torch", "numpy", "gymnasium")
            remedy = f"pip install {name}" if is_needed else ""
            found.append(Finding(name, "not installed", is_needed, remedy))
    return found


def _cores(cores: Mapping[str, Any]) -> list[Finding]:
    usable, quota = cores["usable"], cores["quota"]
    text = f"{usable} of {cores['machine']} usable"
    if quota is not None and quota < usable:
        remedy = (
            f"the cgroup allows {quota:g} cores' time, and what runs on more is stopped again and "
            f"again: raise its limit, or start with taskset -c 0-{max(0, int(quota) - 1)}"
        )
        return [Finding("cores", f"{text}, quota {quota:g}", True, remedy)]
    return [Finding("cores", text)]


def _memory(memory: Mapping[str, Any], needs: Needs) -> list[Finding]:
    available = memory["available"]
    text = f"{available / GIB:.1f} of {memory['total'] / GIB:.1f} GiB free"
    needed = needs.slot_bytes + needs.num_processes * _PROCESS_BYTES
    text += f", limited by {memory['limited_by']}" if memory["total"] else ""
    if not available:
        return [Finding("memory", "unknown")]
    if available < max(needed, GIB):
        remedy = (
            f"{needs.what} needs about {max(needed, GIB) / GIB:.1f} GiB: use fewer actors, fewer "
            f"slots (queue.batch_size) or shorter unrolls, or free some"
        )
        return [Finding("memory", text, True, remedy)]
    return [Finding("memory", text)]


def _shared(memory: Mapping[str, Any], facts: Mapping[str, Any]) -> Finding:
    """UniRL's own slots and weights are anonymous memory: /dev/shm is for what others put there."""
    if "shm_free" not in memory:
        return Finding("/dev/shm", "there is none", bool(facts["packages"]["ray"]), "mount one")
    free = memory["shm_free"]
    users = []
    if len(facts["gpu"]["devices"]) > 1:
        users.append(("NCCL between GPUs", GIB))
    if facts["packages"]["vllm"] is not None:
        users.append(("vLLM", GIB))
    if facts["packages"]["ray"] is not None:
        users.append(("Ray's object store", 256 * 2**20))
    text = f"{free / GIB:.2f} GiB free"
    name, needed = max(users, key=lambda user: user[1], default=("", 0))
    if free < needed:
        remedy = f"{name} wants {needed / GIB:.2g} GiB: docker run --shm-size 8g, or mount a larger"
        return Finding("/dev/shm", text, True, f"{remedy} tmpfs")
    return Finding("/dev/shm", text + " (slots and weights do not use it)")


def _limits(limits: Mapping[str, Any], cores: int, needs: Needs) -> list[Finding]:
    number = needs.num_processes or 2 * cores
    files, hard = limits["open_files"], limits["open_files_hard"]
    wanted = 256 + _FILES_PER_PROCESS * number
    is_low = files is not None and files < wanted
    remedy = f"{wanted} for {number} processes: ulimit -n {min(hard or 65536, 65536)}"
    found = [Finding("open files", _limit(files), is_low, remedy if is_low else "")]
    processes, pids = limits["processes"], limits["cgroup_pids"]
    left = None if pids is None else pids - (limits["cgroup_pids_used"] or 0)
    wanted = 64 + 8 * number  # each has threads, which count
    low = [one for one in (processes, left) if one is not None and one < wanted]
    text = f"{_limit(processes)}, cgroup: {_limit(left)}"
    remedy = f"{wanted} for {number} processes with threads: ulimit -u, docker run --pids-limit"
    return [*found, Finding("processes", text, bool(low), remedy if low else "")]


def _gpus(gpu: Mapping[str, Any]) -> list[Finding]:
    torch_cuda, driver, devices = gpu["torch_cuda"], gpu["driver_cuda"], gpu["devices"]
    builds = f"torch's build: {torch_cuda or 'CPU'}, driver: {driver or 'none'}"
    if gpu["error"] is not None:
        return [Finding("CUDA", f"{builds}; {gpu['error']}", True, "see what nvidia-smi says")]
    if gpu["has_device_files"] and torch_cuda is None:
        return [Finding("CUDA", builds, True, "a GPU is there: pip install torch's CUDA build")]
    if torch_cuda is not None and driver is not None:
        if _numbers(driver)[0] < _numbers(torch_cuda)[0]:
            remedy = f"a driver for CUDA {torch_cuda}, or torch built for {driver}"
            return [Finding("CUDA", builds, True, remedy)]
        if not devices:
            return [Finding("CUDA", builds, True, "no GPU is seen: check CUDA_VISIBLE_DEVICES")]
    found = [Finding("CUDA", builds)]
    for index, device in enumerate(devices):
        found.append(Finding(f"GPU {index}", f"{device['name']}, {device['memory'] / GIB:.0f} GiB"))
    if pairs := gpu["without_peer_access"]:
        remedy = "what they send each other passes through the host: use GPUs under one switch"
        found.append(Finding("GPU peers", f"{len(pairs)} pairs have no access", False, remedy))
    elif len(devices) > 1:
        found.append(Finding("GPU peers", "all have access to each other"))
    return found


def _arithmetic(dtypes: Sequence[str]) -> Finding:
    emulates = "bfloat16" not in dtypes
    hint = "leave policy.compute_dtype auto: bfloat16 would be emulated" if emulates else ""
    return Finding("CPU multiplies", ", ".join(dtypes), False, hint)


def _disk(disk: Mapping[str, Any]) -> Finding:
    subject = f"disk of {disk['folder']}"
    if disk["error"] is not None:
        return Finding(subject, disk["error"], True, "choose another --runs-dir, or its rights")
    text = f"{disk['free'] / GIB:.1f} GiB free, fsync {disk['fsync_ms']:g} ms"
    if disk["free"] < GIB:
        return Finding(subject, text, True, "free some space: checkpoints and logs need it")
    if disk["fsync_ms"] > 500:
        remedy = "each checkpoint waits for it: choose a --runs-dir on a local disk"
        return Finding(subject, text, True, remedy)
    return Finding(subject, text)


def _clock(clock: Mapping[str, Any]) -> Finding:
    words = {True: "is set from outside", False: "nothing sets it", None: "unknown what sets it"}
    hint = "several machines need one time: chrony or ntp" if not clock["is_synchronized"] else ""
    return Finding("clock", words[clock["is_synchronized"]], False, hint)


def compare(nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What differs between nodes. Each has `node`, `facts`, and may have `clock_seconds` (how far
    its clock is ahead of the caller's) and `rates` (see facts_of_nodes).
    """
    found = []
    for name in ("python", *nodes[0]["facts"]["packages"]):
        versions = {
            one["node"]: one["facts"]["python" if name == "python" else "packages"] for one in nodes
        }
        if name != "python":
            versions = {node: packages.get(name) for node, packages in versions.items()}
        if len(set(versions.values())) > 1:
            # Ray refuses other versions of itself and of Python; samples and weights are torch's.
            is_problem = name in ("python", "ray", "torch", "unirl")
            remedy = "install the same on all nodes, or use one image" if is_problem else ""
            found.append(Finding(f"{name} differs", _listed(versions), is_problem, remedy))
    clocks = {one["node"]: one["clock_seconds"] for one in nodes if "clock_seconds" in one}
    if clocks:
        apart = max(clocks.values()) - min(clocks.values())
        shown = {node: f"{seconds:+.2f} s" for node, seconds in clocks.items()}
        remedy = "times in events and logs disagree: set up chrony or ntp" if apart > 1.0 else ""
        found.append(Finding("clocks", _listed(shown), apart > 1.0, remedy))
    for one in nodes:
        for other, rate in one.get("rates", {}).items():
            found.append(_connection(f"{one['node']} to {other}", rate))
    return found


def _connection(way: str, rate: float | str) -> Finding:
    if isinstance(rate, str):
        remedy = "samples and weights travel there: let all ports through between these machines"
        return Finding(f"ports, {way}", rate, True, remedy)
    is_slow = rate < 50
    remedy = "samples and weights travel there: check its network" if is_slow else ""
    return Finding(f"bandwidth, {way}", f"{rate:,.0f} MB/s", is_slow, remedy)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{node}: {value or 'none'}" for node, value in values.items())


def _limit(number: int | None) -> str:
    return "no limit" if number is None else f"{number:,}"


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdecimal()) or 0) for part in parts)

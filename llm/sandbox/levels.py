"""Which sandboxes this machine can have: tried by making one of each level, from the strongest.

    zygote+cgroup  >  zygote  >  bwrap  >  landlock  >  refused

"none" is had only where it is asked for by its name.
"""

from __future__ import annotations

from unirl.errors import UniRLError
from unirl.llm.sandbox.box import Level, SandboxCounts, SandboxFailed
from unirl.llm.sandbox.config import LEVELS, LevelName, SandboxConfig
from unirl.llm.sandbox.pool import LocalSandboxes

_OWN_ROOT = "a root of its own: the system's programs, the interpreter, its workspace"
_FILTER = "an allowlist of system calls; the kernel is shared"
_NAMESPACE = "a network of its own, in which nothing is up"
_OWN_PROCESSES = "sees and signals its own processes alone; all end with its first one"
_RESIDENT = "of each process; of all together by looking 50 times a second: what is fast gets by"
HOLDS: dict[LevelName, dict[str, str]] = {
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
_WANTS: dict[LevelName, str] = {
    "zygote+cgroup": "root, or a delegated cgroup (systemd-run --user -p Delegate=yes)",
    "zygote": "user namespaces (sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0)",
    "bwrap": "bubblewrap (apt install bubblewrap)",
    "landlock": "a kernel with Landlock (5.13, lsm=landlock) and seccomp",
    "none": "nothing",
}
_PROBE = "import decimal, subprocess; print(6 * 7)"


async def make_sandboxes(
    config: SandboxConfig, counts: SandboxCounts | None = None
) -> LocalSandboxes:
    """The sandboxes that a config asks for. Raises UniRLError where this machine has none of them,
    or only some that are weaker than sandbox.level. counts: where to count what they do.
    """
    counts = counts or SandboxCounts()
    if config.kind != "auto":
        name: LevelName = config.kind
        _require(config, name)
        try:
            return await _probe(name, config, (), counts)
        except (SandboxFailed, OSError) as error:
            raise UniRLError(
                f'sandbox.kind "{name}" cannot be had on this machine',
                str(error),
                f"it needs {_WANTS[name]}; or leave sandbox.kind out",
            ) from error
    why: list[str] = []
    for name in LEVELS[:0:-1]:
        if LEVELS.index(name) < LEVELS.index(config.level):
            break
        try:
            return await _probe(name, config, why, counts)
        except (SandboxFailed, OSError) as error:
            why.append(f"{name}: {error} It needs {_WANTS[name]}.")
    raise UniRLError(
        f"no sandbox of level {config.level} or better can be had on this machine",
        " ".join(why),
        'give it what it needs, lower sandbox.level, or set sandbox.kind to "none" to run code '
        "that a model wrote as yourself",
    )


def _require(config: SandboxConfig, name: LevelName) -> None:
    if name != "none" and LEVELS.index(name) < LEVELS.index(config.level):
        raise UniRLError(
            f'sandbox.kind is "{name}"',
            f"sandbox.level asks for {config.level} or better",
            "lower sandbox.level, or leave sandbox.kind out",
        )


async def _probe(
    name: LevelName, config: SandboxConfig, why: list[str] | tuple[str, ...], counts: SandboxCounts
) -> LocalSandboxes:
    """Sandboxes of a level, once a program has run in one."""
    level = Level(name, HOLDS[name], tuple(why))
    made = LocalSandboxes(name, level, config, counts)
    try:
        ran = await made.run(_PROBE)
        if ran.rc != 0 or ran.output != b"42\n":
            raise SandboxFailed(
                f"a program does not run in a sandbox of level {name}",
                f"exit code {ran.rc}, it said {ran.text.strip()[-200:]!r}",
                "name an interpreter that all users can read in sandbox.python",
            )
    except BaseException:
        await made.close()
        raise
    return made

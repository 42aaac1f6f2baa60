"""What sandboxes are made of, and what programs in them may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unirl.config.rules import check_at_least, check_positive, check_setting

Kind = Literal["auto", "zygote+cgroup", "zygote", "bwrap", "landlock", "none", "container", "wasm"]
LevelName = Literal[
    "wasm", "container+kernel", "zygote+cgroup", "zygote", "bwrap", "container", "landlock", "none"
]
_SYSTEM = (
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "root", "run", "sbin",
    "sys", "tmp", "usr", "var", "workspace",
)  # fmt: skip
LEVELS: tuple[LevelName, ...] = (
    "none", "landlock", "container", "bwrap", "zygote", "zygote+cgroup",
    "container+kernel",
    "wasm",
)  # fmt: skip
"""From the weakest to the strongest."""


@dataclass(frozen=True)
class SandboxConfig:
    """How code that a model wrote is kept from everything else."""

    kind: Kind = "auto"
    """What keeps it in. auto: the strongest that this machine has, of zygote+cgroup, zygote, bwrap
    and landlock. none: nothing does, and code can do all that you can. container: a container of
    sandbox.image for each box, of Docker, Podman or what else speaks Docker's interface. wasm:
    Python alone, in WebAssembly.
    """
    level: LevelName = "landlock"
    """The least that will do: with less a run does not start."""
    slots: int = 2
    """Boxes at a time. More: more programs at a time, about 20 MB each and what programs use."""
    network: Literal["none", "recorded", "replayed"] = "none"
    """none: programs reach nothing, this machine included. recorded: they may ask the hosts of
    sandbox.hosts, by a proxy that keeps what they were answered: the same question has the same
    answer from then on. replayed: from what was kept alone. Of levels zygote and zygote+cgroup.
    """
    hosts: tuple[str, ...] = ()
    """That may be asked where the network is recorded: http://HOST or https://HOST, with :PORT if
    that is not the usual one. Programs ask for http://HOST in both cases.
    """
    recording: str = ""
    """The folder of what is recorded. More than one run may use it."""
    max_requests: int = 100
    """That a box may make where the network is recorded or replayed."""
    memory_mb: int = 512
    """Memory of all programs in a box, files of its workspace included where cgroups count them;
    that of each program, where there are none.
    """
    disk_mb: int = 64
    """Files of a workspace, and as much again in /tmp. They are in memory."""
    pids: int = 64
    """Processes and threads of a box."""
    seconds: float = 10.0
    """How long a program may take before it is killed, where its caller does not say."""
    max_output: int = 65536
    """Bytes that a program may write to standard output and error before it is killed."""
    idle_seconds: float = 3600.0
    """How long an open box may be left alone before it is closed."""
    imports: tuple[str, ...] = ()
    """Modules that Python code finds imported, such as numpy: once per slot, instead of each time.
    """
    links: tuple[str, ...] = ()
    """Folders of the root that lead into the workspace, for programs that insist on their paths:
    /app leads to its folder app. With a root of its own alone: zygote and bwrap.
    """
    python: str = ""
    """The interpreter that programs are run by. "": this one, and python3 of a container."""
    image: str = ""
    """Of containers: one that the daemon has, with sh in it, and python3 for Python code."""
    runtime: str = ""
    """Of containers: one that the daemon knows, such as runsc (gVisor). "": the daemon's own."""
    daemon: str = ""
    """Of containers: where it listens, such as unix:///run/podman/podman.sock. "": DOCKER_HOST, or
    Docker's own socket.
    """
    user: str = "65534:65534"
    """Of containers: the user and group that programs run as; a name, or numbers."""
    module: str = ""
    """`module:function` that makes sandboxes of your own, such as those of a hosted service: it is
    given the sandbox config and returns a `Sandboxes` (llm/sandbox/box.py). With kind auto.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "sandbox", self, "slots", "disk_mb", "pids", "max_output", "max_requests")
        for link in self.links:
            name = link.removeprefix("/")
            check_setting(
                link.startswith("/") and name.isidentifier() and name not in _SYSTEM,
                "sandbox.links",
                link,
                f"must be / and a name, and not one of {', '.join(_SYSTEM)}",
                "/app is one",
            )
        check_setting(
            (self.kind == "container") == bool(self.image),
            "sandbox.image",
            self.image,
            f'goes with sandbox.kind "container", and sandbox.kind is "{self.kind}"',
            "set both, or none of them",
        )
        check_setting(
            not self.module or (self.kind == "auto" and ":" in self.module),
            "sandbox.module",
            self.module,
            f'must be module:function, with sandbox.kind "auto", which is "{self.kind}"',
            "leave one of them out",
        )
        check_setting(
            (self.network == "none") == (not self.recording),
            "sandbox.recording",
            self.recording,
            f'goes with sandbox.network recorded or replayed, which is "{self.network}"',
            "set both, or none of them",
        )
        for host in self.hosts:
            check_setting(
                host.partition("://")[0] in ("http", "https")
                and "/" not in host.partition("://")[2],
                "sandbox.hosts",
                host,
                "must be http://HOST or https://HOST, without a path",
                "https://pypi.org is one",
            )
        for name in ("seconds", "idle_seconds"):
            check_positive(f"sandbox.{name}", getattr(self, name), "leave it out")
        check_setting(
            self.memory_mb >= 32 + 2 * self.disk_mb,
            "sandbox.memory_mb",
            self.memory_mb,
            f"must be >= 32 + 2 * sandbox.disk_mb ({32 + 2 * self.disk_mb}): files are in memory",
            "raise it, or lower sandbox.disk_mb",
        )

"""The namespaces of a slot: its processes, network and users are its own, and its root holds the
system's programs, the interpreter and a workspace, and nothing else.

No user of the host is in there but one: as root one that has nothing else on the host, otherwise
the caller itself, without capabilities. Host's root is never mapped. Standard library alone: the
zygote runs this file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from unirl.llm.sandbox import kernel

USER = 1000
"""Who programs are in there."""
_NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)  # fmt: skip
PROXY = ("127.0.0.1", 3128)
"""Where programs find the network that is recorded."""
DEVICES = ("null", "zero", "full", "random", "urandom")


def enter(settings: Mapping[str, Any], control: socket.socket) -> socket.socket | None:
    """Returns the socket of its proxy, where it is to have one."""
    outside, (ready, done) = settings["uid"], os.pipe()
    helper = 0
    if outside is not None:
        # Once in its own user namespace this process may no longer say who it is outside.
        helper = os.fork()
        if helper == 0:
            os.close(done)
            code = 1
            if os.read(ready, 1):
                _map_user(os.getppid(), outside, outside)
                code = 0
            os._exit(code)
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_NAMESPACES)
    if helper:
        os.write(done, b"x")
        if os.waitpid(helper, 0)[1] != 0:
            raise OSError(f"user {outside} cannot be mapped into a user namespace")
    else:
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        _map_user(os.getpid(), user, group)
    os.close(ready)
    os.close(done)
    child = os.fork()
    if child:
        # Stays as the parent of what is process 1 in there.
        control.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    _make_root(settings["binds"], settings["workdir"], settings["links"], outside)
    proxy = _open_proxy() if settings["has_proxy"] else None
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.sethostname("sandbox")
    kernel.drop_bounding_set()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    return proxy


def _open_proxy() -> socket.socket:
    """A socket of this namespace, in which loopback is all that there is; others accept for it."""
    proxy = socket.socket()
    kernel.bring_up(proxy.fileno(), "lo")
    proxy.bind(PROXY)
    proxy.listen(16)
    return proxy


def _map_user(pid: int, user: int, group: int) -> None:
    for name, outside in (("uid_map", user), ("gid_map", group)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(f"{USER} {outside} 1")


def _make_root(binds: list[str], workdir: str, into: list[str], outside: int | None) -> None:
    """A root of its own, in which these paths can be read and nothing else is there. into: links to
    folders of the workspace.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    links = {path: os.readlink(path) for path in binds if os.path.islink(path)}
    # Copied before this process becomes another user, who may not pass the folders above them.
    trees = {path: kernel.clone_tree(path) for path in binds if path not in links}
    devices = {f"/dev/{name}": kernel.clone_tree(f"/dev/{name}") for name in DEVICES}
    folders = {path for path in trees if os.path.isdir(path)}
    if outside is not None:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    # Over a folder that is there on every host, in this mount namespace alone.
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    for path, tree in (trees | devices).items():
        target = path.lstrip("/")
        if path in folders:
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        kernel.make_read_only(tree, has_devices=path in devices)
        kernel.move_mount(tree, target)
        os.close(tree)
    for path, link in links.items():
        os.symlink(link, path.lstrip("/"))
    for path in into:
        os.symlink(f"{workdir}{path}", path.lstrip("/"))
    for path in ("proc", "tmp", workdir.lstrip("/")):
        os.makedirs(path, exist_ok=True)
    for name, link in (("shm", "/tmp"), ("fd", "/proc/self/fd")):
        os.symlink(link, f"dev/{name}")
    os.makedirs("etc", exist_ok=True)
    with open("etc/passwd", "w") as file:
        file.write(f"user:x:{USER}:{USER}::{workdir}:/bin/sh\n")
    with open("etc/group", "w") as file:
        file.write(f"user:x:{USER}:\n")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    with contextlib.suppress(PermissionError):  # parts of this host's are hidden: there is none
        kernel.mount("proc", "proc", "proc", flags)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY
    kernel.mount("none", "/", "", flags | kernel.MS_NOSUID | kernel.MS_NODEV)

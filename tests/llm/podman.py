"""Podman for tests: a daemon of our own with storage of its own, and an image that is made of this
machine's programs, as no registry is asked.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

IMAGE = "localhost/unirl-test"
_PROGRAMS = (
    "python3", "sh", "cat", "chmod", "sleep", "ls", "mkdir", "ln", "mkfifo", "true", "rm", "env",
    "setsid", "bash", "cp", "pwd",
)  # fmt: skip


@functools.cache
def daemon(runtime: str = "runc") -> str:
    """Where it listens. Skips the test where there is none."""
    if shutil.which("podman") is None or shutil.which("runc") is None or os.geteuid() != 0:
        pytest.skip("containers need podman and runc (apt install podman runc), and root")
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("the image is made of /usr/bin/python3, which is not there")
    folder = Path(tempfile.mkdtemp(prefix="unirl-podman-"))
    address = f"unix://{folder}/podman.sock"
    podman = [
        "podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--runtime", runtime,
        "--cgroup-manager", "cgroupfs", "--events-backend", "file", "--tmpdir", f"{folder}/tmp",
    ]  # fmt: skip
    log = (folder / "log").open("wb")
    service = subprocess.Popen(
        [*podman, "system", "service", "--time=0", address], stdout=log, stderr=log, cwd=folder
    )
    atexit.register(_end, service, podman, folder)
    _make_image(folder / "image.tar")
    ran = subprocess.run(
        [*podman, "import", f"{folder}/image.tar", IMAGE], capture_output=True, text=True
    )
    deadline = time.monotonic() + 20
    while not (folder / "podman.sock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if ran.returncode == 0:  # a machine may have Podman, and let it start nothing
        limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
        command = [*podman, "run", "--rm", "--network", "none", *limits, IMAGE, "true"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if ran.returncode or not (folder / "podman.sock").exists():
        pytest.skip(f"podman does not work here: {ran.stderr} {(folder / 'log').read_text()}")
    return address


@functools.cache
def gvisor() -> str:
    """The runtime, for a machine that lends no cgroups of version 2 and no KVM to it."""
    if shutil.which("runsc") is None:
        pytest.skip("gVisor needs runsc (apt install runsc)")
    path = Path(tempfile.mkdtemp(prefix="unirl-runsc-")) / "runsc"
    path.write_text(
        '#!/bin/sh\nexec runsc --network=none --platform=ptrace --ignore-cgroups "$@"\n'
    )
    path.chmod(0o755)
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return str(path)


def _end(service: subprocess.Popen[bytes], podman: list[str], folder: Path) -> None:
    subprocess.run([*podman, "rm", "--all", "--force"], capture_output=True, timeout=60)
    service.terminate()
    service.wait(20)
    # What watched its programs stays for five minutes, to be asked how they ended.
    subprocess.run(["pkill", "-KILL", "-f", f"conmon .*{folder}/"], capture_output=True)
    subprocess.run(["umount", f"{folder}/root/overlay"], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def _make_image(path: Path) -> None:
    """Python, a shell and a few programs, with the libraries that they load."""
    programs = [str(shutil.which(name, path="/usr/bin:/bin")) for name in _PROGRAMS]
    version = os.path.basename(os.path.realpath("/usr/bin/python3"))
    modules = [str(each) for each in Path(f"/usr/lib/{version}/lib-dynload").glob("*.so")]
    asked = subprocess.run(["ldd", *programs, *modules], capture_output=True, text=True)
    libraries = set(re.findall(r"(/\S+) \(0x", asked.stdout))

    def needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        left_out = ("__pycache__", "/test", "ensurepip", "idlelib", "lib2to3", "pydoc_data")
        return None if any(each in member.name for each in left_out) else member

    with tarfile.open(path, "w") as tar:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        for name in ("tmp", "proc", "sys", "dev", "etc", "workspace"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for each in sorted({*programs, *libraries}):
            inside = each if each.startswith("/usr/") else f"/usr{each}"
            tar.add(os.path.realpath(each), inside)
        tar.add(f"/usr/lib/{version}", f"/usr/lib/{version}", filter=needed)

"""Images of tasks: built from their folder once, and known by its content."""

from __future__ import annotations

import contextlib
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from unirl.llm.sandbox.box import SandboxFailed
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.containers.container import asking, connect

_BUILD_SECONDS = 1800
_NAME = "localhost/unirl-task"


class Image(NamedTuple):
    name: str
    workdir: str
    """Where its programs start."""


def build(config: SandboxConfig, folder: Path) -> str:
    """The image of a folder with a Dockerfile; as with `docker build`, what that loads comes from
    the network of the daemon. Blocks, for minutes. Raises SandboxFailed.
    """
    import docker

    name = f"{_NAME}:{_digest(folder)}"
    with contextlib.closing(connect(config)) as api, asking(f"{folder} cannot be built", config):
        with contextlib.suppress(docker.errors.ImageNotFound):
            api.inspect_image(name)
            return name
        said = ""
        for line in api.build(
            path=str(folder), tag=name, rm=True, forcerm=True, decode=True, timeout=_BUILD_SECONDS
        ):
            said = str(line.get("error") or line.get("stream") or said)
            if "error" in line:
                raise SandboxFailed(
                    f"the image of {folder} cannot be built",
                    said.strip()[-500:],
                    f"docker build {folder} shows why",
                )
    return name


def find(config: SandboxConfig, name: str) -> Image:
    """Raises SandboxFailed where the daemon does not have it."""
    with contextlib.closing(connect(config)) as api, asking("an image cannot be had", config, name):
        found = api.inspect_image(name)
    return Image(name, str((found.get("Config") or {}).get("WorkingDir") or "/"))


def _digest(folder: Path) -> str:
    digest = blake2b(digest_size=12)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            about = f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111}\0{len(data)}\0"
            digest.update(about.encode() + data)
    return digest.hexdigest()

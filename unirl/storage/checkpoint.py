"""Checkpoints that are whole or absent, and never pickled: written aside, synced, renamed.

A run's `checkpoints/` holds `step_00012000/{model,optimizer,samples}.safetensors` with
`state.json` beside them, and `latest`, a link to the newest. Digests are checked on load.
One process at a time writes to it; readers may come at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from unirl.core.tree import Tree
from unirl.errors import UniRLError
from unirl.storage import disk
from unirl.storage.tensor_file import (
    Damage,
    note_tree,
    parse_tensors,
    read_verified,
    restore_tree,
    write_synced,
    write_tensors,
)

log = logging.getLogger(__name__)

JSON: TypeAlias = "bool | int | float | str | list[JSON] | Mapping[str, JSON] | None"

FORMAT = 1
"""Version of the folder's layout; a folder of another version is refused, never guessed at."""

_STEP = re.compile(r"step_(\d{8,})")
_TREES = ("model", "optimizer", "samples")


@dataclass
class Checkpoint:
    """One checkpoint, read and verified; tensors are on the CPU."""

    path: Path
    step: int
    model: Any
    """The tree given to `save_checkpoint`: nested dictionaries of tensors."""
    optimizer: Any
    samples: Any
    """Samples that were waiting for the learner; None when none were saved."""
    state: dict[str, Any]
    """Counters, generator states, versions: whatever JSON held."""


def save_checkpoint(
    root: Path,
    step: int,
    *,
    model: Tree,
    optimizer: Tree,
    state: Mapping[str, JSON],
    samples: Tree | None = None,
    keep: int = 3,
) -> Path:
    """Write the checkpoint of `step` under the run folder `root`, and point `latest` to it.

    Tensors may have any strides and device, share storage, or be 0-d; a tree may also hold None,
    bool, int, float and str leaves and empty dictionaries. A step that exists is replaced.
    keep: how many checkpoints up to this step stay; those of later steps, left by a run that was
    rewound, are not touched until training reaches them.

    The process may be killed at any instant: the disk then holds the state before or after this
    call. Returns the checkpoint's folder. Raises UniRLError when a value cannot be stored or the
    disk is full; earlier checkpoints are intact then.
    """
    if step < 0 or keep < 1:
        raise UniRLError(
            f"checkpoint of step {step} with keep={keep} is impossible",
            "step >= 0 and keep >= 1 must hold",
            "pass the number of environment steps so far, and keep at least one checkpoint",
        )
    _check_json(state, "state")
    trees = {"model": model, "optimizer": optimizer}
    if samples is not None:
        trees["samples"] = samples
    # Everything that can be wrong with the values is found here, before the disk is touched.
    tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trees}
    notes = {name: note_tree(tree, (name,), tensors[name]) for name, tree in trees.items()}

    folder = checkpoints_folder(root)
    final = folder / f"step_{step:08d}"
    aside = folder / f".tmp-{step:08d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        aside.mkdir()
        files = {
            f"{name}.safetensors": write_tensors(aside / f"{name}.safetensors", flat)
            for name, flat in tensors.items()
        }
        document: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "files": files,
            "trees": notes,
            "state": state,
        }
        _write_document(aside / "state.json", document)
        disk.sync_folder(aside)
        _put_in_place(aside, final)
        _link_latest(folder, final.name)
        disk.sync_folder(folder)
    except OSError as error:
        raise _explain_write_error(error, folder, step, tensors) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _prune(folder, final, keep)
    return final


def load_checkpoint(where: Path) -> Checkpoint:
    """Read and verify a checkpoint; `where` is a run folder, its `checkpoints/`, or one checkpoint.

    Of several, the one `latest` names is read, else the highest complete step. Raises UniRLError
    when there is none, when a file is missing, truncated or altered (every byte is under a
    digest), or when the format is unknown.
    """
    where = Path(where)
    one = _STEP.fullmatch(where.name) or (where / "state.json").is_file() or where.name == "latest"
    for is_last_try in (*[False] * 9, True):
        path = where.resolve() if one else latest(where)
        if path is None:
            break
        try:
            return _read(path)
        except Damage as damage:
            # A trainer that saves meanwhile may have replaced it under our hands: read the newer.
            if one or is_last_try or not isinstance(damage, _Vanished):
                what = f"checkpoint file {damage.file} is damaged"
                raise UniRLError(what, damage.rule, _other(damage.file.parent)) from None
    raise UniRLError(
        f"no checkpoint in {where}",
        f"a run folder has checkpoints/step_XXXXXXXX/state.json; {_describe(where)}",
        "check the path, or start the run with unirl train",
    )


def latest(root: Path) -> Path | None:
    """The checkpoint that `latest` names, else the highest complete step, else None."""
    link = checkpoints_folder(root) / "latest"
    if (link / "state.json").is_file():
        return link.resolve()
    found = list_checkpoints(root)
    return found[-1] if found else None


def list_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints by ascending step; complete: every file is there in full size."""
    folder = checkpoints_folder(root)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        # A replacement killed half-way leaves only its step's earlier version, under this name.
        name = path.name.removeprefix(".old-")
        is_newest = name == path.name or not (folder / name).exists()
        if _STEP.fullmatch(name) and is_newest and _is_complete(path):
            found.append(path)
    return sorted(found, key=_step)


def checkpoints_folder(root: Path) -> Path:
    """`root` itself when it is named checkpoints, else the folder of that name in it."""
    root = Path(root)
    return root if root.name == "checkpoints" else root / "checkpoints"


def _check_json(value: Any, path: str) -> None:
    """Refuse what json.dumps would alter silently: integer keys become strings, tuples lists."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise _not_json(f"{path}[{key!r}]", f"has a key of type {type(key).__name__}")
            _check_json(child, f"{path}/{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _check_json(child, f"{path}[{index}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise _not_json(path, f"is a {type(value).__name__}")


def _not_json(path: str, found: str) -> UniRLError:
    return UniRLError(
        f"checkpoint {path} {found}",
        "state holds JSON only: None, bool, int, float, str, list, and dict with string keys",
        "convert it (tensors belong to `model` or `optimizer`)",
    )


def _write_document(path: Path, document: Mapping[str, Any]) -> None:
    """state.json: one line per section, and a digest of its own content."""
    lines = [f'"{key}": {json.dumps(value, default=dict)}' for key, value in document.items()]
    lines.append(f'"sha256": "{_digest(document)}"')
    write_synced(path, iter([("{\n" + ",\n".join(lines) + "\n}\n").encode()]))


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=dict).encode()).hexdigest()


def _put_in_place(aside: Path, final: Path) -> None:
    """Rename into place; no rename replaces a folder, so an earlier version moves away first."""
    old = final.with_name(f".old-{final.name}")
    replaces = final.exists()
    if replaces:
        os.rename(final, old)
    try:
        os.rename(aside, final)
    except OSError:
        if replaces:
            os.rename(old, final)
        raise
    disk.sync_folder(final.parent)
    if replaces:
        disk.delete_folder(old)


def _link_latest(folder: Path, target: str) -> None:
    link = folder / f".latest-{os.getpid()}"
    os.symlink(target, link)
    os.replace(link, folder / "latest")


def _prune(folder: Path, newest: Path, keep: int) -> None:
    reached = [path for path in list_checkpoints(folder) if _step(path) <= _step(newest)]
    for path in reached[:-keep]:
        try:
            disk.delete_folder(path)
        except OSError as error:
            # The new checkpoint is safe; one too many on disk must not end a run.
            log.warning("could not delete the old checkpoint %s: %s", path, error)


def _sweep(folder: Path) -> None:
    """Clear what killed writers left: folders half written or half deleted, a half replacement."""
    for path in list(folder.iterdir()):
        if path.name.startswith(".old-"):
            final = folder / path.name.removeprefix(".old-")
            if final.exists():
                disk.delete_folder(path)
            else:
                os.rename(path, final)
        elif path.name.startswith((".tmp-", disk.TRASH)):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(".latest-"):
            path.unlink(missing_ok=True)


def _explain_write_error(
    error: OSError, folder: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> UniRLError:
    needed = sum(t.numel() * t.dtype.itemsize for flat in tensors.values() for t in flat.values())
    found = list_checkpoints(folder)
    intact = f"; {found[-1]} is intact" if found else ""
    if disk.is_full(error):
        return UniRLError(
            f"disk full: the checkpoint of step {step} could not be written to {folder}",
            f"it needs {needed:,} bytes, {disk.free_bytes(folder):,} are free; "
            f"{disk.who_refused(error)}",
            f"free some space, then resume the run{intact}",
        )
    return UniRLError(
        f"the checkpoint of step {step} could not be written to {folder}: {error}",
        "the run folder must stay writable during training",
        f"check its owner and mount, then resume the run{intact}",
    )


class _Vanished(Damage):
    """The file is not there."""


def _read(path: Path) -> Checkpoint:
    trees: dict[str, Any] = dict.fromkeys(_TREES)
    with contextlib.ExitStack() as stack:
        # All files are opened at once, and in this folder even if it is renamed: a trainer that
        # replaces or deletes the checkpoint from now on does not disturb the reader.
        folder = _open(stack, path)
        document = _parse_document(path, _open_file(stack, folder, path / "state.json").read())
        files = {name: _open_file(stack, folder, path / name) for name in document["files"]}
        for name, note in document["trees"].items():
            file = f"{name}.safetensors"
            content = read_verified(path / file, files[file], document["files"][file])
            trees[name] = restore_tree(note, parse_tensors(content))
    return Checkpoint(path=path, step=document["step"], state=document["state"], **trees)


def _open(stack: contextlib.ExitStack, path: Path) -> int:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        file = path / "state.json"
        raise _Vanished(file, f"a checkpoint is a folder; {_describe(path)}") from None
    stack.callback(os.close, folder)
    return folder


def _open_file(stack: contextlib.ExitStack, folder: int, file: Path) -> BinaryIO:
    try:
        descriptor = os.open(file.name, os.O_RDONLY, dir_fd=folder)
    except FileNotFoundError:
        rule = f"expected {file.name}, found no such file; {_describe(file.parent)}"
        raise _Vanished(file, rule) from None
    return stack.enter_context(open(descriptor, "rb"))


def _parse_document(path: Path, content: bytes) -> dict[str, Any]:
    file = path / "state.json"
    try:
        document = json.loads(content)
    except ValueError as error:
        raise Damage(file, f"expected JSON, found {len(content):,} bytes ({error})") from None
    version = document.get("format") if isinstance(document, dict) else None
    if version != FORMAT:
        raise UniRLError(
            f"checkpoint {path} has format {version!r}",
            f"this version of UniRL reads format {FORMAT}",
            "load it with the version that wrote it, or update: pip install --upgrade unirl",
        )
    expected = document.pop("sha256", None)
    found = _digest(document)
    if found != expected:
        raise Damage(file, f"expected sha256 {expected}, found {found}")
    return dict(document)


def _other(path: Path) -> str:
    """The remedy when `path` cannot be read: the good checkpoint before it, else any good one."""
    others = [] if path.parent.name != "checkpoints" else list_checkpoints(path.parent)
    good = [other for other in others if other.name != path.name and _is_intact(other)]
    if not good:
        return "no other good checkpoint is there: restore the file from a copy, or start again"
    earlier = [other for other in good if _step(other) < _step(path)]
    if earlier:
        return f"use the previous good checkpoint: {earlier[-1]}"
    return f"use {good[0]}, which is good"


def _is_complete(path: Path) -> bool:
    try:
        document = json.loads((path / "state.json").read_bytes())
        entries = document["files"].items()
        return all((path / name).stat().st_size == entry["bytes"] for name, entry in entries)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _is_intact(path: Path) -> bool:
    try:
        _read(path)
    except (Damage, UniRLError, OSError):
        return False
    return True


def _step(path: Path) -> int:
    """Of a path that `list_checkpoints` gave, or of any other: -1."""
    match = _STEP.fullmatch(path.name.removeprefix(".old-"))
    return int(match[1]) if match else -1


def _describe(where: Path) -> str:
    if not where.exists():
        return f"{where} does not exist"
    if not where.is_dir():
        return f"{where} is not a folder"
    return f"found {disk.entries(where, 6) or 'an empty folder'}"

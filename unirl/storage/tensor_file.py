"""Trees of tensors in safetensors files, synced, with size and digest; source: the format's README.

Any reader of the format opens these files, but they are written here: the library's writer refuses
tensors that share storage, copies all of them to the host at once, and neither syncs nor hashes
what it writes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unirl.errors import UniRLError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}


class Damage(Exception):
    """A file of a checkpoint is not what was written: the file, and what was expected and found."""

    def __init__(self, file: Path, rule: str) -> None:
        super().__init__(file, rule)
        self.file, self.rule = file, rule


def note_tree(tree: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    """A tree as JSON: an object for a dictionary, [name] for a tensor, a plain value for itself.

    Its tensors are collected under unique names: a key may hold the separator itself, and a tree
    may be a single tensor.
    """
    if isinstance(tree, torch.Tensor):
        if (
            tree.dtype not in _DTYPES
            or tree.layout != torch.strided
            or tree.is_meta
            or tree.is_quantized
        ):
            raise _unstorable(path, f"a {tree.layout} tensor of {tree.dtype} on {tree.device}")
        name = "/".join(path[1:]) or path[0]
        while name in tensors or name == "__metadata__":
            name += "~"
        tensors[name] = tree.detach()
        return [name]
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str):
                raise _unstorable((*path, repr(key)), f"a key of type {type(key).__name__}")
        return {key: note_tree(child, (*path, key), tensors) for key, child in tree.items()}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise _unstorable(path, f"a {type(tree).__name__}")


def restore_tree(note: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `note_tree` made a note of."""
    if isinstance(note, dict):
        return {key: restore_tree(child, tensors) for key, child in note.items()}
    return tensors[note[0]] if isinstance(note, list) else note


def _unstorable(path: tuple[str, ...], found: str) -> UniRLError:
    return UniRLError(
        f"checkpoint cannot hold {'/'.join(path)}: it is {found}",
        "trees are dictionaries with string keys of dense tensors, numbers and strings",
        "convert it to a tensor, or store it in `state` as JSON",
    )


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int | str]:
    """Stream the tensors to a safetensors file and sync it; returns its size and sha256."""
    # Wide types first: each tensor then starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return write_synced(path, _chunks(head, [tensor for _, tensor in ordered]))


def _chunks(head: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors:
        if tensor.numel():
            # device -> host, one tensor at a time
            dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            yield dense.reshape(-1).view(torch.uint8).numpy().data


def write_synced(path: Path, chunks: Iterator[bytes | memoryview]) -> dict[str, int | str]:
    """The bytes to a new file, on the disk when this returns; its size and sha256."""
    digest, num_bytes = hashlib.sha256(), 0
    with open(path, "xb", buffering=1 << 20) as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            num_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def read_verified(path: Path, file: BinaryIO, expected: Mapping[str, Any]) -> bytearray:
    """The bytes of an open file. Raises Damage unless size and sha256 are those expected."""
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes != expected["bytes"]:
        raise Damage(path, f"expected {expected['bytes']:,} bytes, found {num_bytes:,}")
    content = bytearray(num_bytes)
    file.readinto(content)  # type: ignore[attr-defined]
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected["sha256"]:
        raise Damage(path, f"expected sha256 {expected['sha256']}, found {digest}")
    return content


def parse_tensors(content: bytearray) -> dict[str, torch.Tensor]:
    """The tensors of a verified safetensors file, in place: views of its bytes, not copies.

    Contiguous, whatever they were: the format knows no memory layouts.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8:start]).items():
        dtype, shape, (begin, end) = _NAMES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if begin == end:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        count = (end - begin) // dtype.itemsize
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin)
        tensors[name] = flat.reshape(shape)
    return tensors

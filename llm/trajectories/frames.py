"""The body of an episode: a frame for its head and one for each turn, each compressed by itself, so
that one turn can be read without the others.

    "UTJ1" | number of frames: uint32 | end of each frame: uint64 | frames
    frame: codec: uint8 | compressed: length of JSON: uint32 | JSON | given ids | drawn ids | logp

Texts are beside the ids: a body can be read without the tokenizer. Values that are the same for
many tokens (version, what was drawn) are runs in the JSON. A log-probability is a float32 where
that loses nothing, as with all engines, and else a float64.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import Completion

MAGIC = b"UTJ1"
_HEAD = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")
_ZLIB, _ZSTD = 1, 2

Reader = Callable[[int, int], bytes]
"""Bytes of a body: (offset, length)."""


class TornBody(ValueError):
    """The bytes are not those of a body."""


@cache
def _zstd() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]] | None:
    try:
        import zstandard
    except ImportError:
        return None
    # An object for each call: they may not be shared between threads, and cost a microsecond.
    return (
        lambda data: zstandard.ZstdCompressor(level=1).compress(data),
        lambda data: zstandard.ZstdDecompressor().decompress(data),
    )


def _packed(data: bytes) -> bytes:
    zstd = _zstd()
    if zstd is None:
        return bytes([_ZLIB]) + zlib.compress(data, 1)
    return bytes([_ZSTD]) + zstd[0](data)


def _unpacked(frame: bytes) -> bytes:
    codec, data = frame[0], frame[1:]
    if codec == _ZLIB:
        return zlib.decompress(data)
    zstd = _zstd()
    if codec != _ZSTD or zstd is None:
        raise TornBody(
            "it was compressed by zstandard, which is not installed: pip install 'unirl[store]'"
            if codec == _ZSTD
            else f"codec {codec} is unknown"
        )
    return zstd[1](data)


def encode(episode: Episode, prompt: Sequence[int] = (), clean: Callable[[str], str] = str) -> bytes:
    """An episode's body. prompt: its group's. clean: is given each frame's JSON, and may change
    texts in it.
    """
    shared = tuple(prompt)
    first = episode.turns[0].given if episode.turns else ()
    head = {
        "ending": episode.ending,
        "why": episode.why,
        "outcome": episode.outcome,
        "seconds": episode.seconds,
        "info": episode.info,
        "prompt": len(shared) if first[: len(shared)] == shared else list(shared),
    }
    frames = [_packed(_framed(clean(_json(head)), b""))]
    frames += [_packed(_turn_frame(turn, clean)) for turn in episode.turns]
    begin = _HEAD.size + 8 * len(frames)
    ends = itertools.accumulate(map(len, frames), initial=begin)
    table = struct.pack(f"<{len(frames)}Q", *itertools.islice(ends, 1, None))
    return b"".join((_HEAD.pack(MAGIC, len(frames)), table, *frames))


def decode(body: bytes) -> tuple[Episode, tuple[int, ...]]:
    """The episode of a body, and its group's prompt."""
    bounds = _bounds(lambda begin, size: body[begin : begin + size])
    if bounds[-1] != len(body):
        raise TornBody(f"it has {len(body)} bytes, and should have {bounds[-1]}")
    head, *rest = (_unpacked(body[begin:end]) for begin, end in itertools.pairwise(bounds))
    values, _ = _unframed(head)
    turns = [_turn(frame) for frame in rest]
    shared = values.pop("prompt")
    prompt = turns[0].given[:shared] if isinstance(shared, int) and turns else shared or ()
    return Episode(turns=turns, **values), tuple(prompt)


def read_turn(read: Reader, index: int) -> Turn:
    """One turn, by reading the table of frames and its frame."""
    size = _count(read)
    if not 0 <= index < size - 1:
        raise IndexError(f"it has {size - 1} turns, numbered from 0, and no turn {index}")
    # Frame 0 is the head; the end of the frame before is where this one begins.
    begin, end = struct.unpack("<2Q", read(_HEAD.size + 8 * index, 16))
    return _turn(_unpacked(read(begin, end - begin)))


def _count(read: Reader) -> int:
    head = read(0, _HEAD.size)
    if len(head) != _HEAD.size or head[:4] != MAGIC:
        raise TornBody("it does not begin as a body does")
    return int(_HEAD.unpack(head)[1])


def _bounds(read: Reader) -> list[int]:
    size = _count(read)
    ends = np.frombuffer(read(_HEAD.size, 8 * size), "<u8").tolist()
    return [_HEAD.size + 8 * size, *ends]


def _turn_frame(turn: Turn, clean: Callable[[str], str]) -> bytes:
    drawn = turn.completion
    given_ids, drawn_ids = _ids(turn.given), _ids(drawn.tokens)
    logp = np.array(drawn.logp, np.float64)
    small = logp.astype(np.float32)
    if small.astype(np.float64).tobytes() == logp.tobytes():
        logp = small
    values = {
        "parent": turn.parent,
        "origin": turn.origin,
        "trained": turn.trained,
        "reward": turn.reward,
        "started": turn.started,
        "seconds": turn.seconds,
        "finish": drawn.finish,
        "version": _runs(drawn.version),
        "drawn": _runs(drawn.drawn),
        "messages": turn.messages,
        "answer": turn.answer,
        "info": turn.info,
        "arrays": [[each.dtype.str, each.size] for each in (given_ids, drawn_ids, logp)],
    }
    arrays = b"".join((given_ids.tobytes(), drawn_ids.tobytes(), logp.tobytes()))
    return _framed(clean(_json(values)), arrays)


def _turn(frame: bytes) -> Turn:
    values, rest = _unframed(frame)
    arrays, begin = [], 0
    for dtype, size in values.pop("arrays"):
        array = np.frombuffer(rest, dtype, size, begin)
        begin += array.nbytes
        arrays.append(tuple(array.tolist()))
    given, tokens, logp = arrays
    version, drawn, finish = (values.pop(name) for name in ("version", "drawn", "finish"))
    completion = Completion(tokens, logp, _spread(version), finish, _spread(drawn))
    values["messages"] = tuple(values["messages"])
    return Turn(given=given, completion=completion, **values)


def _ids(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    try:
        return np.array(tokens, np.uint32)
    except OverflowError:
        return np.array(tokens, np.int64)


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    return [[value, sum(1 for _ in same)] for value, same in itertools.groupby(values)]


def _spread(runs: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable([value] * count for value, count in runs))


def _plain(value: Any) -> Any:
    # What JSON cannot hold must not lose the episode.
    return dict(value) if isinstance(value, Mapping) else repr(value)


_json = json.JSONEncoder(default=_plain, separators=(",", ":")).encode


def _framed(text: str, arrays: bytes) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw + arrays


def _unframed(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    return json.loads(frame[_LENGTH.size : end]), memoryview(frame)[end:]

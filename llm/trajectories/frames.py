"""The body of an episode: a frame for its head and one for each turn, each compressed by itself, so
that one turn can be read without the others.

    "UTJ1" | number of frames: uint32 | end of each frame: uint64 | frames
    frame: codec: uint8 | length of what is compressed: uint32 | compressed | logp
    compressed: length of JSON: uint32 | JSON | given ids | drawn ids

Texts are beside the ids: a body can be read without the tokenizer. Values that are the same for
many tokens (version, what was drawn) are runs in the JSON. A log-probability is a float32 where
that loses nothing, as with all engines, and else a float64; it would hardly get smaller. All
numbers are little-endian, as the machines that torch runs on.
"""

from __future__ import annotations

import itertools
import json
import struct
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import Completion

MAGIC = b"UTJ1"
_HEAD = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")
_FRAME = struct.Struct("<BI")
_ZLIB, _ZSTD = 1, 2

_USUAL: tuple[tuple[str, Any], ...] = (
    ("origin", "extended"), ("trained", True), ("reward", None), ("token_rewards", ()),
    ("started", 0.0), ("seconds", 0.0), ("messages", ()), ("answer", {}), ("info", {}),
)  # fmt: skip
"""Fields of a turn that are left out where they are as Turn has them by default."""

Reader = Callable[[int, int], bytes]
"""Bytes of a body: (offset, length)."""


class TornBody(ValueError):
    """The bytes are not those of a body."""


class _Codecs(threading.local):
    """zstandard's, of this thread: they may not be shared, and making one takes longer than
    compressing a turn. None: it is not installed.
    """

    def __init__(self) -> None:
        self.compress: Callable[[bytes], bytes] | None = None
        self.decompress: Callable[[bytes], bytes] | None = None
        try:
            import zstandard
        except ImportError:
            return
        self.compress = zstandard.ZstdCompressor(level=1).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


@cache
def _codecs() -> _Codecs:
    return _Codecs()


def _packed(data: bytes, plain: bytes = b"") -> bytes:
    compress = _codecs().compress
    codec, small = (_ZSTD, compress(data)) if compress else (_ZLIB, zlib.compress(data, 1))
    return _FRAME.pack(codec, len(small)) + small + plain


def _unpacked(frame: bytes) -> tuple[bytes, bytes]:
    """What was compressed, and what was not."""
    codec, size = _FRAME.unpack_from(frame)
    data, plain = frame[_FRAME.size : _FRAME.size + size], frame[_FRAME.size + size :]
    return _decompressed(codec, data), plain


def _decompressed(codec: int, data: bytes) -> bytes:
    if codec == _ZLIB:
        return zlib.decompress(data)
    decompress = _codecs().decompress
    if codec != _ZSTD or decompress is None:
        raise TornBody(
            "it was compressed by zstandard, which is not installed: pip install 'unirl[store]'"
            if codec == _ZSTD
            else f"codec {codec} is unknown"
        )
    return decompress(data)


class Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def encode(
    episode: Episode,
    prompt: Sequence[int] = (),
    clean: Callable[[str], str] = str,
    digest: Hash | None = None,
) -> bytes:
    """An episode's body. prompt: its group's. clean: is given the JSON of all frames, a line each,
    and may change texts in it. digest: is given the tokens of the tree.
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
    parts = [(_json(head), b"", b"")]
    parts += [_turn_parts(turn, digest) for turn in episode.turns]
    # All texts at once: JSON has no line breaks, and looking through each is half of the work.
    texts = clean("\n".join(text for text, _, _ in parts)).split("\n")
    frames = [
        _packed(_framed(text, ids), logp) for text, (_, ids, logp) in zip(texts, parts, strict=True)
    ]
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
    values, _ = _unframed(head[0])
    turns = [_turn(*frame) for frame in rest]
    shared = values.pop("prompt")
    prompt = turns[0].given[:shared] if isinstance(shared, int) and turns else shared or ()
    return Episode(turns=turns, **values), tuple(prompt)


def plain_texts(body: bytes) -> list[str]:
    """The JSON of each frame, to look for something in: tokens are left out."""
    bounds = _bounds(lambda begin, size: body[begin : begin + size])
    found = []
    for begin, end in itertools.pairwise(bounds):
        packed = _unpacked(body[begin:end])[0]
        size = _LENGTH.unpack_from(packed)[0]
        found.append(packed[_LENGTH.size : _LENGTH.size + size].decode("utf-8", "replace"))
    return found


def read_turn(read: Reader, index: int) -> Turn:
    """One turn, by reading where the frames are up to it, and its frame."""
    # Frame 0 is the head; the end of the frame before is where this one begins.
    known = read(0, _HEAD.size + 8 * (max(index, 0) + 2))
    size = _count(lambda begin, size: known[begin : begin + size])
    if not 0 <= index < size - 1:
        raise IndexError(f"it has {size - 1} turns, numbered from 0, and no turn {index}")
    begin, end = struct.unpack_from("<2Q", known, _HEAD.size + 8 * index)
    return _turn(*_unpacked(read(begin, end - begin)))


def _count(read: Reader) -> int:
    head = read(0, _HEAD.size)
    if len(head) != _HEAD.size or head[:4] != MAGIC:
        raise TornBody("it does not begin as a body does")
    return int(_HEAD.unpack(head)[1])


def _bounds(read: Reader) -> list[int]:
    size = _count(read)
    ends = struct.unpack(f"<{size}Q", read(_HEAD.size, 8 * size))
    return [_HEAD.size + 8 * size, *ends]


def hash_turn(turn: Turn, digest: Hash) -> None:
    """What makes it the same turn: its tokens, and where they are in the tree."""
    given, tokens = _ids(turn.given), _ids(turn.completion.tokens)
    digest.update(struct.pack("<3q", turn.parent, len(given), len(tokens)))
    digest.update(given.tobytes() + tokens.tobytes())


def _turn_parts(turn: Turn, digest: Hash | None) -> tuple[str, bytes, bytes]:
    """A turn's JSON, its tokens, and its log-probabilities."""
    drawn = turn.completion
    given, tokens = _ids(turn.given), _ids(drawn.tokens)
    ids = given.tobytes() + tokens.tobytes()
    if digest is not None:
        hash_turn(turn, digest)
    logp = array("f", drawn.logp)
    if tuple(logp) != drawn.logp:
        logp = array("d", drawn.logp)
    values = {
        "parent": turn.parent,
        **{name: value for name, usual in _USUAL if (value := getattr(turn, name)) != usual},
        "finish": drawn.finish,
        "version": _runs(drawn.version),
        "drawn": _runs(drawn.drawn),
        "given": [given.typecode, len(given)],
        "tokens": [tokens.typecode, len(tokens)],
        "logp": logp.typecode,
    }
    return _json(values), ids, logp.tobytes()


def _turn(packed: bytes, plain: bytes) -> Turn:
    values, ids = _unframed(packed)
    found = []
    for name in ("given", "tokens"):
        kind, size = values.pop(name)
        one = array(kind)
        one.frombytes(ids[: size * one.itemsize])
        ids = ids[size * one.itemsize :]
        found.append(tuple(one))
    given, tokens = found
    logp = array(values.pop("logp"))
    logp.frombytes(plain)
    version, drawn, finish = (values.pop(name) for name in ("version", "drawn", "finish"))
    completion = Completion(tokens, tuple(logp), _spread(version), finish, _spread(drawn))
    for name in ("messages", "token_rewards"):
        if name in values:
            values[name] = tuple(values[name])
    return Turn(given=given, completion=completion, **values)


def _ids(tokens: Sequence[int]) -> array[int]:
    try:
        return array("I", tokens)
    except OverflowError:
        return array("q", tokens)


def _runs(values: tuple[Any, ...]) -> list[list[Any]]:
    if values and values.count(values[0]) == len(values):
        return [[values[0], len(values)]]
    return [[value, sum(1 for _ in same)] for value, same in itertools.groupby(values)]


def _spread(runs: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable([value] * count for value, count in runs))


def _plain(value: Any) -> Any:
    # What JSON cannot hold must not lose the episode.
    return dict(value) if isinstance(value, Mapping) else repr(value)


_json = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False).encode


def _framed(text: str, arrays: bytes) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw + arrays


def _unframed(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    return json.loads(frame[_LENGTH.size : end]), memoryview(frame)[end:]

"""Hashes of conversations, each message of which is hashed once.

A client sends its whole history with every request. The newest conversations are kept to compare
with: only what a request adds to one of them is read, which takes a tenth of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unirl.llm.agents.tool_calls import canonical, sorted_json
from unirl.llm.tasks.task import Message

_MOST_KEPT = 8


class _Known(NamedTuple):
    tools: bytes
    messages: list[Any]
    """Copies, as agents change theirs in place."""
    chain: list[bytes]


class Histories:
    """Of one session."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def chain(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """[i]: a hash of the tools and the first i messages, as `canonical` has them."""
        first = hashed(b"", sorted_json(list(tools)))
        best, common = None, 0
        for known in self._known:
            if known.tools == first and (same := _num_same(known.messages, messages)) > common:
                best, common = known, same
        chain = [first] if best is None else best.chain[: common + 1]
        copies = [] if best is None else best.messages[:common]
        for message in messages[common:]:
            chain.append(hashed(chain[-1], sorted_json(canonical(message))))
            copies.append(_copy(message))
        if best is not None and common == len(best.messages):
            # It is the beginning of this one.
            self._known = [known for known in self._known if known is not best]
        self._known.insert(0, _Known(first, copies, chain))
        del self._known[_MOST_KEPT:]
        return [*chain]


def beginning(messages: Sequence[Message], chain: Sequence[bytes]) -> bytes:
    """Of the tools and the system's turn."""
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    return chain[1] if has_system else chain[0]


def hashed(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _num_same(own: Sequence[Any], messages: Sequence[Message]) -> int:
    for i, (one, other) in enumerate(zip(own, messages, strict=False)):
        if one != other:
            return i
    return min(len(own), len(messages))


def _copy(value: Any) -> Any:
    """What equals the value alone: numbers do not, as 1 == True, which are written differently."""
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is dict and all(type(key) is str for key in value):
        return {key: _copy(each) for key, each in value.items()}
    if kind is list:
        return [_copy(each) for each in value]
    return object()

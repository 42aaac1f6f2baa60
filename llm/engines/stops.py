"""Stop texts of a completion that is continued: one may begin in what there is and end in what is
drawn next, but what a tool said, or an earlier turn, ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unirl.llm.engine import Completion, Request

STOP_MARGIN = 8
"""Tokens decoded beyond those a stop text can have: the first of a piece may decode otherwise."""
_INCOMPLETE = "\ufffd"
"""What the first bytes of a character decode to."""


def longest_bytes(stop: Sequence[str]) -> int:
    """Most tokens that a stop text can have: of a byte each."""
    return max(len(text.encode()) for text in stop)


def turn_start(partial: Completion | None, stop: Sequence[str], decode: Callable[..., str]) -> int:
    """Index of the first token that a stop text may begin in."""
    if partial is None or not stop:
        return 0
    mask = partial.mask
    first = len(mask)
    while first and mask[first - 1]:
        first -= 1
    text = decode(list(partial.tokens[first:]))
    # A whole one has ended the turn: what follows is the next.
    return len(mask) if any(one in text for one in stop) else first


class StopJoin:
    """Looks for a stop text that an interruption cut in two, where the engine's own search sees
    only what it draws itself.
    """

    def __init__(self, carried: Sequence[int], stop: Sequence[str], decode: Any) -> None:
        self._carried, self._stop, self._decode = list(carried), stop, decode
        self._limit = longest_bytes(stop)
        self._checked = 0
        self.found: int | None = None
        """Tokens after the interruption at whose end a stop text is complete."""

    def end(self, tokens: Sequence[int]) -> int | None:
        """Of these tokens, drawn so far, how many complete a stop text; None: not yet. Asked again
        when there are more.
        """
        for count in range(self._checked + 1, min(len(tokens), self._limit) + 1):
            text = self._decode([*self._carried, *tokens[:count]])
            if any(one in text for one in self._stop):
                self.found = count
                break
            self._checked = count
        return self.found


def stop_join(request: Request, tokenizer: Callable[[], Any]) -> StopJoin | None:
    """None where no stop text can have begun in what there is."""
    partial, stop = request.partial, request.sampling.stop
    if partial is None or not partial.tokens or not stop:
        return None
    decode = tokenizer().decode
    carried = list(partial.tokens[turn_start(partial, stop, decode) :])
    carried = carried[-longest_bytes(stop) - STOP_MARGIN :]
    text = decode(carried) if carried else ""
    begun = text.endswith(_INCOMPLETE) or any(
        text.endswith(one[:count]) for one in stop for count in range(1, len(one))
    )
    return StopJoin(carried, stop, decode) if begun else None

"""What a process must know to be let in."""

from __future__ import annotations

import hashlib
import hmac
import secrets


class Token:
    """What a node must know to be let in: 32 random bytes."""

    def __init__(self, data: bytes | None = None) -> None:
        self.data = secrets.token_bytes(32) if data is None else data

    @property
    def words(self) -> tuple[int, ...]:
        """As values of a frame."""
        parts = (self.data[i : i + 8] for i in range(0, 32, 8))
        return tuple(int.from_bytes(part, "little", signed=True) for part in parts)

    @property
    def near_address(self) -> str:
        """Where nodes on the learner's machine reach it: a name that others cannot guess, without a
        file.
        """
        return f"\0unirl-{hashlib.blake2b(self.data, digest_size=16).hexdigest()}"

    def fits(self, words: tuple[int, ...]) -> bool:
        """Whether these are its words; takes the same time wherever they differ."""
        found = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
        return hmac.compare_digest(found, self.data)

"""Whether two tokenizers give the same tokens the same numbers."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any


def vocabulary_digest(tokenizer: Any) -> str:
    """Of all tokens with their ids."""
    digest = blake2b(digest_size=8)
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number} {token}\0".encode("utf-8", "replace"))
    return digest.hexdigest()

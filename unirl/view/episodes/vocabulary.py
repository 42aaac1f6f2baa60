"""Texts of token ids, from what the learner has written beside its samples."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.view.files import opened, signature

NAME = "samples/vocabulary.json"
_MAX_BYTES = 64 << 20


class Vocabulary:
    """One run's. Without the file ids are shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[tuple[int, ...], list[str]] = ((), [])

    def spell(self, token: int) -> str:
        texts = self._known[1]
        return texts[token] if 0 <= token < len(texts) else f"⟨{token}⟩"

    def load(self) -> None:
        """Read it, if it is there and was not read."""
        now = signature(self._folder / NAME)
        if now == self._known[0]:
            return
        try:
            with opened(self._folder, NAME) as file:
                found = json.loads(file.read(_MAX_BYTES).decode("utf-8", "replace"))
        except (OSError, ValueError, RecursionError):
            found = []
        texts = found if isinstance(found, list) else []
        self._known = now, [text[:200] if isinstance(text, str) else "" for text in texts]

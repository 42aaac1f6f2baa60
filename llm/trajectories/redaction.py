"""What looks like a key or a password is taken out of texts before they are written.

It sees JSON, so what it replaces is within one JSON string, and what it puts there needs no escape.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

SHOWN = "[redacted]"
_NAME = r"(?:api[_-]?key|access[_-]?key|secret|passwd|password|credential|auth[_-]?token)"
# Repetitions are bounded: what a policy writes must not take a pattern quadratic time.
_KEY = re.compile(
    r"""
    \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}                      # OpenAI, Anthropic, Stripe
    | \b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,} | \bglpat-[A-Za-z0-9_-]{16,}
    | \bhf_[A-Za-z0-9]{20,} | \bxox[abeoprs]-[A-Za-z0-9-]{10,} | \bAIza[A-Za-z0-9_-]{30,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \beyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,}    # JSON web token
    | -----BEGIN\ [A-Z\ ]{0,30}PRIVATE\ KEY-----
      [^"]{0,8000}?-----END\ [A-Z\ ]{0,30}PRIVATE\ KEY-----
    """,
    re.VERBOSE,
)
_NAMED = re.compile(
    rf"""(?i)({_NAME}[a-z0-9_-]{{0,40}}(?:\\?")?\s{{0,9}}[:=]\s{{0,9}}(?:\\?")?(?:bearer\s)?"""
    r"""|\bbearer\s{1,9})([a-z0-9_\-./+=~!@#$%^&*]{8,})"""
)
_KEY_HINTS = (
    "sk-", "pk-", "rk-", "sk_", "pk_", "rk_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_",
    "glpat-", "hf_", "xox", "AIza", "AKIA", "ASIA", "eyJ", "-----BEGIN",
)  # fmt: skip
_NAME_HINTS = ("key", "secret", "passw", "credential", "auth", "bearer")
"""One of them is in whatever the patterns find: looking for them first is twenty times faster."""
_SHORTEST = 8
"""Characters: a shorter value of a variable is a word that may stand anywhere."""


class Redaction:
    """Changes JSON; counts how often it found something."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """variables: of the process by default; values of those named like keys are looked for."""
        named = re.compile(r"(?i)key|token|secret|passw|credential")
        found = (os.environ if variables is None else variables).items()
        values = {json.dumps(value)[1:-1] for name, value in found if named.search(name)}
        values = {
            value
            for value in values
            if len(value) >= _SHORTEST and not value.isdecimal() and not value.startswith("/")
        }
        self._values = sorted(values, key=len, reverse=True)
        self.count = 0

    def __call__(self, text: str) -> str:
        if len(text) < _SHORTEST:
            return text
        for value in self._values:
            if value in text:
                self.count += text.count(value)
                text = text.replace(value, SHOWN)
        if _has_one(text, _KEY_HINTS):
            text, number = _KEY.subn(SHOWN, text)
            self.count += number
        if _has_one(text.lower(), _NAME_HINTS):
            text, number = _NAMED.subn(rf"\g<1>{SHOWN}", text)
            self.count += number
        return text


def _has_one(text: str, hints: tuple[str, ...]) -> bool:
    for hint in hints:  # noqa: SIM110  (`any` makes a generator, for each of all texts)
        if hint in text:
            return True
    return False

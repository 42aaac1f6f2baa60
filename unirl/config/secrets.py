"""What may not be written down: values of fields whose metadata says {"secret": True}."""

from __future__ import annotations

from typing import Any

_HIDDEN = "://(not stored)"


def redacted(value: Any) -> Any:
    """As it may be stored and shown: the name of a variable, env:NAME, stays; of a URL only its
    scheme does.
    """
    if isinstance(value, str):
        if not value:
            return value  # there is nothing to hide, and it must be read back as it was
        scheme = value.partition("://")[0] if "://" in value else ""
        return value if value.startswith("env:") else scheme + _HIDDEN
    return [redacted(one) for one in value]


def is_redacted(value: str) -> bool:
    """Whether it was read back from where it was stored."""
    return value.endswith(_HIDDEN)

"""Words and numbers of a request's query, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from unirl.errors import UniRLError

T = TypeVar("T")


def number(
    query: Mapping[str, str],
    key: str,
    default: float | None = None,
    least: float = -1e300,
    most: float = 1e300,
) -> float:
    """A number of a query. Raises UniRLError where it is none, or out of its bounds."""
    text = query.get(key) or ("" if default is None else str(default))
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UniRLError(
            f"{key} is {text[:40]!r}", f"it is a number from {least:g} to {most:g}", "leave it out"
        )
    return value


def choice(query: Mapping[str, str], key: str, known: tuple[str, ...]) -> str:
    """One of some words of a query, by default the first."""
    value = query.get(key) or known[0]
    if value not in known:
        raise UniRLError(
            f"{key} is {value[:40]!r}", f"it is one of {', '.join(known)}", f"try {known[0]}"
        )
    return value


def words(query: Mapping[str, str], key: str) -> list[str]:
    """Words with commas between them."""
    return list(dict.fromkeys(word for word in query.get(key, "").split(",") if word))


def bounded(found: list[T], name: str, most: int) -> list[T]:
    """The list; UniRLError where it is empty or too long."""
    if not 1 <= len(found) <= most:
        raise UniRLError(
            f"{name} names {len(found)}",
            f"1 to {most} at a time, with commas between them",
            "ask for them in several requests" if found else f"give {name}=...",
        )
    return found

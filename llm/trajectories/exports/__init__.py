"""Stored episodes in the formats of others."""

from __future__ import annotations

from importlib import metadata


def our_version() -> str:
    """UniRL's version, as far as it is installed."""
    try:
        return metadata.version("unirl")
    except metadata.PackageNotFoundError:
        return "unknown"

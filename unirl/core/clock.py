"""The clock that all processes of a machine share."""

from __future__ import annotations

import time


def micros() -> int:
    """Microseconds of the monotonic clock."""
    return time.monotonic_ns() // 1000

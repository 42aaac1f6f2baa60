"""How long the phases of a swap of weights took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class SwapTimes:
    """Seconds of the last swap by phase, and of all swaps together."""

    last: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    count: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.last[name] = self.last.get(name, 0.0) + time.perf_counter() - begin

    def begin(self) -> None:
        self.last = {}

    def end(self) -> None:
        self.total += sum(self.last.values())
        self.count += 1

    def as_stats(self) -> dict[str, float]:
        """swaps, swap_seconds (of all) and swap_<phase>_seconds (of the last one)."""
        phases = {f"swap_{name}_seconds": value for name, value in self.last.items()}
        return {"swaps": float(self.count), "swap_seconds": self.total} | phases

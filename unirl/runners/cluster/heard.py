"""What node agents have said of their members: restarts, and events of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from unirl.run_events import event

log = logging.getLogger(__name__)


class Heard:
    """Counts what each agent says once. Agents have numbers of their own: none is used twice."""

    def __init__(self) -> None:
        self._restarts: dict[int, int] = {}
        self._events: dict[int, int] = {}

    @property
    def num_restarts(self) -> int:
        """Of members, by all agents that there were."""
        return sum(self._restarts.values())

    def take(self, agent: int, node: str, status: Mapping[str, Any]) -> None:
        """What an agent said last; its new events are logged as the run's own."""
        number = int(status.get("restarts", 0))
        self._restarts[agent] = max(number, self._restarts.get(agent, 0))
        for found in status.get("events", ()):
            if found["number"] > self._events.get(agent, 0):
                self._events[agent] = found["number"]
                facts = {k: v for k, v in found.items() if k not in ("event", "text", "number")}
                about = event(str(found["event"]), **{**facts, "agent": agent, "node": node[:12]})
                level = logging.WARNING if found["event"] == "died" else logging.INFO
                log.log(level, "node agent %d: %s", agent, found["text"], extra=about)

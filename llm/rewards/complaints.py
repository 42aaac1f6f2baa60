"""Why rewards give no scores, in the log: enough to see what is wrong, not a line for each
completion.
"""

from __future__ import annotations

import logging
import re
import time

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 10.0
"""Between two complaints about one reward."""
MOST_REASONS = 20
"""Logged of one reward; what fails in more ways than that has been complained about enough."""


class Complaints:
    """Logs each reason of each reward once. A reason that comes too soon after another is logged
    when it comes again.
    """

    def __init__(self) -> None:
        self._logged: dict[str, set[str]] = {}
        self._last: dict[str, float] = {}

    def log(
        self, reward: str, why: str, num: int, of: int, error: BaseException | None = None
    ) -> None:
        """num: completions without a score, of so many in the group. error: one that was not
        expected, logged with its traceback.
        """
        logged = self._logged.setdefault(reward, set())
        # With other numbers and quotations it is the same reason.
        reason = re.sub(r"\d+|'.*'|\".*\"", "", why)
        now = time.monotonic()
        soon = now - self._last.get(reward, -_PAUSE_SECONDS) < _PAUSE_SECONDS
        if reason in logged or len(logged) >= MOST_REASONS or soon:
            return
        logged.add(reason)
        self._last[reward] = now
        log.warning(
            'reward "%s" gives %d of %d completions no score: %s',
            reward,
            num,
            of,
            why,
            exc_info=error,
        )

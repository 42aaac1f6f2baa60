"""Alerts: messages to people when a run needs them, through Apprise; source:
https://github.com/caronc/apprise.

The training thread only puts sentences into a queue. A thread of their own sends them, and has a
deadline at the end of the run; what cannot be delivered is a warning, once. URLs are secrets: no
message of ours shows more than their scheme.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Protocol

from unirl.config.secrets import is_redacted, redacted
from unirl.errors import UniRLError
from unirl.run_events import event_of

log = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long the end of a run waits for its last message."""
_REWARDS = ("charts/episodic_return", "reward")
"""What is watched: the first of these that a row has."""
_EVENTS = ("died", "restarted")
"""What of a run's events is sent at once; how the run ends is said at its end."""
_MAX_WAITING = 100


class Alerted(Protocol):
    """The part of a run's config that is about alerts."""

    @property
    def alerts(self) -> Sequence[str]: ...
    @property
    def alert_reward_drop(self) -> float: ...
    @property
    def alert_window_seconds(self) -> float: ...


class _Progress(Protocol):
    """What a training loop shows of itself."""

    @property
    def reason(self) -> str | None: ...
    @property
    def learner(self) -> Any: ...


class _Rows(Protocol):
    """What writes the rows of metrics."""

    @property
    def scalars(self) -> Mapping[str, float]:
        """The newest row."""


def receivers(urls: Sequence[str]) -> list[Any]:
    """Apprise's objects of these URLs. Raises UniRLError, without the URL, for one that is none."""
    found: list[Any] = []
    given = [(number, url) for number, url in enumerate(urls) if not is_redacted(url)]
    if not given:
        return found
    try:
        import apprise
    except ImportError as error:
        raise UniRLError(
            f"run.alerts has {len(given)} entries",
            "they are sent by apprise, which is not installed",
            "pip install 'unirl[alerts]', or leave run.alerts out",
        ) from error
    # It prints its own complaints, some with parts of a URL, when nobody else handles them.
    logging.getLogger("apprise").addHandler(logging.NullHandler())
    logging.getLogger("apprise").propagate = False
    for number, url in given:
        name, where = url, f"run.alerts[{number}]"
        if url.startswith("env:"):
            name, url = url[4:], os.environ.get(url[4:], "")
            where += f", the variable {name},"
            if not url:
                raise UniRLError(
                    f"{where} is not set",
                    "env:NAME is the variable that holds an Apprise URL",
                    f"export {name}=..., or leave the entry out",
                )
        receiver = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        if receiver is None:
            scheme = redacted(url).partition(":")[0] if "://" in url else ""
            raise UniRLError(
                f"{where} is no URL that apprise can send to",
                f"it begins with {scheme}:// and has to be complete"
                if scheme
                else "an Apprise URL has the form SERVICE://...",
                "see https://github.com/caronc/apprise/wiki, and try it: apprise -b hello URL",
            )
        found.append(receiver)
    return found


class Alerts(AbstractContextManager["Alerts"]):
    """The alerts of one run. In its block deaths and restarts become messages; at the end of the
    block, how it ended does.

    As a hook after the one that writes `rows`: a falling reward.
    """

    def __init__(self, config: Alerted, name: str, rows: _Rows | None = None) -> None:
        self._receivers = receivers(config.alerts)
        self._num_missing = sum(map(is_redacted, config.alerts))
        self._name, self.rows = name, rows
        self._fall = RewardFall(config.alert_reward_drop, config.alert_window_seconds)
        self._last_row: Mapping[str, float] | None = None
        self._end = "before the first update"
        self._waiting: queue.Queue[tuple[str, str] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._handler = _EventHandler(self)

    def send(self, kind: str, text: str) -> None:
        """Have a message sent; returns at once."""
        if not self._receivers:
            return
        if self._thread is None:  # late: processes that were forked before have no thread
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._waiting.put_nowait((kind, text))

    def __enter__(self) -> Alerts:
        if self._receivers:
            logging.getLogger("unirl").addHandler(self._handler)
        if self._num_missing:
            log.warning(
                "%d URL(s) of run.alerts were not stored with the run: give them again, best as "
                "env:NAME",
                self._num_missing,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger("unirl").removeHandler(self._handler)
        if error is None:
            self.send("ended", self._end)
        else:
            what = error.what if isinstance(error, UniRLError) else f"{error}"
            self.send("gave up", f"{type(error).__name__}: {what}")
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=END_SECONDS / 2)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._warn("they took longer than the end of a run waits")

    def after_update(self, loop: _Progress) -> None:
        """Hook: look at a row that is new."""
        row = self.rows.scalars if self.rows is not None else {}
        if row is not self._last_row and row:
            self._last_row = row
            self._look(row, time.monotonic())

    def at_end(self, loop: _Progress) -> None:
        """Hook: how it ended."""
        self.after_update(loop)
        self._end = f"{loop.reason} after {loop.learner.num_steps:,} steps"

    def _look(self, row: Mapping[str, float], now: float) -> None:
        name = next((name for name in _REWARDS if name in row), None)
        text = self._fall.look(row[name], now) if name is not None else None
        if text is not None:
            self.send("reward fell", f"{name} {text}")

    def _work(self) -> None:
        """The thread: what waits becomes one message."""
        is_last = False
        while not is_last:
            news = [self._waiting.get()]
            with suppress(queue.Empty):
                while True:
                    news.append(self._waiting.get_nowait())
            is_last = None in news
            said = [one for one in news if one is not None]
            if said:
                self._deliver(said)

    def _deliver(self, news: Sequence[tuple[str, str]]) -> None:
        kinds = dict.fromkeys(kind for kind, _ in news)
        title = f"unirl {self._name}: {', '.join(kinds)}"
        body = "\n".join(f"{kind}: {text}" for kind, text in news)
        is_bad = bool(set(kinds) - {"ended", "restarted"})
        for receiver in self._receivers:
            try:
                done = receiver.notify(
                    body=body, title=title, notify_type="warning" if is_bad else "info"
                )
                if not done:
                    self._warn("the server did not take them")
            except Exception as error:
                # Its text may hold the URL.
                self._warn(type(error).__name__)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("alerts are not delivered: %s; the run continues without them", why)


class RewardFall:
    """Whether the mean reward of the last `window_seconds` has fallen by `drop` of what it gained.

    What it gained is the best such mean, less the worst one before it. A fall within the noise of
    the rows themselves is none.
    """

    def __init__(self, drop: float, window_seconds: float) -> None:
        self._drop, self._window = drop, window_seconds
        self._rows: deque[tuple[float, float]] = deque()
        self._started = math.nan
        self._worst = self._best = math.nan
        self._is_low = False

    def look(self, reward: float, now: float) -> str | None:
        """What is to be said about one more row; None while there is nothing."""
        if not self._drop or not math.isfinite(reward):
            return None
        if math.isnan(self._started):
            self._started = now
        self._rows.append((now, reward))
        while now - self._rows[0][0] > self._window:
            self._rows.popleft()
        if now - self._started < self._window or len(self._rows) < 2:
            return None
        values = [value for _, value in self._rows]
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        if math.isnan(self._best):
            self._worst = self._best = mean
        if mean > self._best:
            self._best, self._is_low = mean, False
        gain, loss = self._best - self._worst, self._best - mean
        if gain == 0:
            self._worst = self._best = min(mean, self._best)
        is_low = gain > 0 and loss > self._drop * gain and loss > 2 * spread / len(values) ** 0.5
        if loss < self._drop * gain / 2:
            self._is_low = False  # it recovered: another fall is another message
        if is_low and not self._is_low:
            self._is_low = True
            return (
                f"fell from {self._best:.4g} to {mean:.4g}, by more than {self._drop:g} of the "
                f"{gain:.4g} that it had gained (means over {self._window:g} s)"
            )
        return None


class _EventHandler(logging.Handler):
    """Events of the run, as messages."""

    def __init__(self, alerts: Alerts) -> None:
        super().__init__(logging.INFO)
        self._alerts = alerts

    def emit(self, record: logging.LogRecord) -> None:
        found = event_of(record)
        if found is not None and found["event"] in _EVENTS:
            error = record.exc_info[1] if record.exc_info else None
            text = record.getMessage().partition("\n")[0]
            if error is not None:
                text += f": {type(error).__name__}: {error}".partition("\n")[0]
            self._alerts.send(found["event"], text)

"""Queues of every transport for all tests of this folder."""

from __future__ import annotations

from tests.transports.queues import make_queue

__all__ = ["make_queue"]

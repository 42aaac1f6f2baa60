"""Every test of this folder is of a cluster: of several raylets on this machine, or of nodes that
are processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Ray reads them when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "5e" * 32)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("cluster")

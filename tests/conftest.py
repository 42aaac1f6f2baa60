"""What every test relies on: one torch thread, repeatable examples, an order for two workers, and
which tests are fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples in every run: a red build is caused by the change, never by chance.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

TESTS = Path(__file__).resolve().parent
HEAVY = ("system",)
"""Folders and files with tests that start processes, train or load models. All others are fast."""

LOCKS = "UNIRL_TEST_LOCKS"
"""Names, in the environment, the folder of the locks that keep serial tests alone."""


def is_heavy(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / name) for name in HEAVY)


def pytest_configure(config: pytest.Config) -> None:
    # CI has two cores, and many tests start processes of their own.
    torch.set_num_threads(1)
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the variable
        locks = tempfile.TemporaryDirectory(prefix="unirl-tests-")
        config.add_cleanup(locks.cleanup)
        os.environ[LOCKS] = locks.name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing what is deselected anyway takes half a minute.
    fast_only = config.getoption("markexpr") == "fast"
    return True if fast_only and is_heavy(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_gpu = item.get_closest_marker("gpu") is not None
        if is_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not (is_gpu or item.get_closest_marker("slow") or is_heavy(item.path)):
            item.add_marker("fast")
    # The longest files come first, so that the last ones end together; those that measure time come
    # last, when mypy, which runs beside the tests, is done.
    serial = {item.path for item in items if item.get_closest_marker("serial")}
    system = TESTS / "system"
    items.sort(key=lambda item: (item.path in serial, not item.path.is_relative_to(system)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Outside of the test, so that its time-out does not count the wait.
    with turn(Path(os.environ[LOCKS]), alone=item.get_closest_marker("serial") is not None):
        return (yield)


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """A reader-writer lock between the workers; a writer that waits keeps new readers out.

    POSIX locks, which processes that a test forks do not inherit.
    """
    with (folder / "gate").open("a+") as gate, (folder / "tests").open("a+") as tests:
        fcntl.lockf(gate, fcntl.LOCK_EX)
        fcntl.lockf(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.lockf(gate, fcntl.LOCK_UN)
        yield

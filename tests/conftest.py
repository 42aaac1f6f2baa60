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

import pytest

TESTS = Path(__file__).resolve().parent
HEAVY = (
    "actors/test_evaluate.py",
    "actors/test_evaluate_device.py::test_mujoco_draws",
    "actors/test_inference.py",
    "benchmarks",
    "cluster",
    "envs/sim/test_gym_cartpole.py",
    "envs/sim/test_isaacgym.py::test_isaacgym_first",
    "envs/sim/test_samplers.py::test_environment_workers",
    "envs/test_atari.py",
    "envs/test_faults.py",
    "envs/test_pettingzoo.py",
    "export",
    "learners/test_parallel.py",
    "learners/test_truncation.py",
    "llm/agents/test_browsers.py",
    "llm/agents/test_endpoint.py",
    "llm/agents/test_native.py",
    "llm/agents/test_rollout.py",
    "llm/agents/test_samples.py",
    "llm/agents/test_serve.py",
    "llm/agents/test_session.py",
    "llm/agents/test_tools.py",
    "llm/agents/test_world_packages.py",
    "llm/test_adapter_transfer.py",
    "llm/test_canaries.py",
    "llm/test_distill.py",
    "llm/test_dtype.py",
    "llm/test_effect.py",
    "llm/test_evaluation.py",
    "llm/test_export.py",
    "llm/test_grpo_cli.py",
    "llm/test_hf_engine.py",
    "llm/test_hf_server.py",
    "llm/test_in_vain.py",
    "llm/test_learner",
    "llm/test_lora.py",
    "llm/test_openai_engine.py",
    "llm/test_own_folder.py",
    "llm/test_pack",
    "llm/test_probe.py",
    "llm/test_prefix_cache.py",
    "llm/test_prompts.py",
    "llm/test_ranks.py",
    "llm/test_replay.py",
    "llm/test_rewards_judge.py",
    "llm/test_rewards_model.py",
    "llm/test_rewards_workers.py",
    "llm/test_rollout.py",
    "llm/test_router.py",
    "llm/test_code_tests.py",
    "llm/test_sandbox",
    "llm/test_saved_samples.py",
    "llm/test_sharding.py",
    "llm/test_teacher_server.py",
    "llm/test_token_mdp.py",
    "llm/test_vllm",
    "llm/trajectories/test_ledger.py",
    "llm/test_weight_transfer.py",
    "population",
    "report/test_alerts.py",
    "report/test_trackers.py",
    "report/test_video.py",
    "runners",
    "storage/test_checkpoint",
    "supervision/test_fork_server.py",
    "sweep/test_sweep.py",
    "system",
    "test_bench",
    "test_callbacks.py",
    "test_cli.py",
    "test_docs.py::test_a_short_run",
    "test_docs.py::test_every_metric_of_a_run",
    "test_launch.py",
    "test_layers.py",
    "test_packaging.py",
    "test_pages.py::test_every_block_of_a_page",
    "test_site.py",
    "trained",
    "transports/test_queue_concurrency.py",
    "transports/test_queue_schedules.py",
    "view/test_page.py",
    "view/test_pictures.py",
    "view/test_view_command.py",
    "vtrace/test_targets.py::test_compiles",
)
"""Beginnings of the names of tests that start processes, train or load models. The others are fast,
and together they take about a minute.
"""
LONGEST = (
    "system/test_grpo_faults.py",
    "cluster",
    "system/test_ppo.py",
    "runners/test_processes.py",
    "system/test_data_parallel.py",
    "test_cli.py",
    "test_bench",
    "system/test_grpo.py",
    "llm",
    "actors",
    "test_pages.py",
    "system",
    "runners",
    "transports",
    "storage",
    "learners",
    "envs",
    "supervision",
)
"""Beginnings of the names of files, those that take longest first: two workers end together when
only short files are left at the end.
"""
LOCKS = "UNIRL_TEST_LOCKS"
"""Names, in the environment, the folder of the locks that keep serial tests alone."""


def is_heavy(path: Path, test: str = "") -> bool:
    return f"{path.relative_to(TESTS).as_posix()}::{test}".startswith(HEAVY)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the variable
        locks = tempfile.TemporaryDirectory(prefix="unirl-tests-")
        config.add_cleanup(locks.cleanup)
        os.environ[LOCKS] = locks.name
        if config.getoption("numprocesses", None):
            return  # it hands out tests, and the workers wait for what it imports
    import hypothesis
    import torch

    # CI has two cores, and many tests start processes of their own.
    torch.set_num_threads(1)
    # The same examples in every run: a red build is caused by the change, never by chance.
    hypothesis.settings.register_profile(
        "repeatable", deadline=None, derandomize=True, print_blob=True
    )
    hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing what is deselected anyway takes half a minute.
    fast_only = config.getoption("markexpr") == "fast" and collection_path.suffix == ".py"
    return True if fast_only and is_heavy(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        is_gpu = item.get_closest_marker("gpu") is not None
        if is_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not (is_gpu or item.get_closest_marker("slow") or is_heavy(item.path, item.name)):
            item.add_marker("fast")
    # Those that measure time come last, when mypy, which runs beside the tests, is done. Keep their
    # files short: while they run, the other worker waits.
    serial = {item.path for item in items if item.get_closest_marker("serial")}
    items.sort(key=lambda item: (item.path in serial, rank(item.path)))


def rank(path: Path) -> tuple[bool, int]:
    """Where a file comes in the order of all."""
    name = path.relative_to(TESTS).as_posix()
    places = (place for place, begin in enumerate(LONGEST) if name.startswith(begin))
    return not is_heavy(path), next(places, len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    # What it loads is decided once: a server that the first test starts for a policy would let each
    # engine import transformers again, five seconds of a core.
    starts_processes = any(item.get_closest_marker("fast") is None for item in session.items)
    if starts_processes and hasattr(session.config, "workerinput"):
        from tests.forked import start_server

        start_server()


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

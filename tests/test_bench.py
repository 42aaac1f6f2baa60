"""Measuring: stages are what they say, the limit fits the figures, nothing stays behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl import cli
from unirl.bench import usage
from unirl.bench.apart import measure_apart
from unirl.bench.end_to_end import measure_end_to_end
from unirl.bench.host_reads import CountHostReads
from unirl.bench.limits import find_limit
from unirl.bench.shapes import Shape, Tried, knobs_of, search, start_of
from unirl.bench.stages import Figures, StageName
from unirl.bench.stopwatch import Stopwatch
from unirl.bench.table import plain_lines
from unirl.bench.trial import without_run
from unirl.commands.bench import SUITES, left_out, print_report
from unirl.commands.tune import tune
from unirl.config import fields_help, flag_of
from unirl.config.shipped import shipped_configs
from unirl.core.actor import Actor
from unirl.errors import ActorFailed, UniRLError
from unirl.metrics.timers import Timers
from unirl.policy.precision import has_bfloat16
from unirl.runners.plan import Plan

STAGES = ("stepping", "inference", "weights", "learning", "end_to_end")
UNSPLIT_STAGES = ("acting", "weights", "learning", "end_to_end")
ROOT = Path(cli.__file__).resolve().parent.parent
SMALL = {
    "actor.num_envs": 4,
    "actor.unroll_length": 8,
    "policy.hidden": (8,),
    "runner.learner_threads": 1,
}


def small_plan(recipe: str = "impala", **overrides: Any) -> Plan:
    return unirl.make_plan(recipe, **{**SMALL, **overrides})


# ------------------------------------------------------------------------------------------ stages


def test_the_window_excludes_what_came_before_it() -> None:
    stopwatch = Stopwatch(0.1)
    num_steps = 1_000_000  # of a warm-up that was far faster
    while not stopwatch.tick(num_steps):
        time.sleep(0.01)
        num_steps += 10
    figures = stopwatch.figures()
    assert 0.1 <= figures["seconds"] < 1
    assert 0 < figures["env_steps_per_second"] <= 1000
    assert figures["env_steps"] % 10 == 0


def test_laps_add_up_by_name_and_cost_next_to_nothing() -> None:
    timers = Timers()
    timers.start()
    time.sleep(0.02)
    timers.lap("waiting")
    while time.perf_counter() % 0.05 < 0.04:
        pass
    timers.lap("working")
    time.sleep(0.02)
    timers.lap("waiting")
    assert 0.04 <= timers.seconds("waiting") < 1
    assert timers.cpu_seconds("waiting") == timers.seconds("never") == 0
    timers.reset()
    assert timers.seconds("waiting") == 0
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            timers.lap("waiting")
        costs.append((time.perf_counter() - started) / 100)
    assert min(costs) < 10e-6


def test_cpu_time_of_laps_is_that_of_work_alone() -> None:
    timers = Timers()
    timers.counts_cpu = True
    timers.start()
    time.sleep(0.1)
    timers.lap("waiting")
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    timers.lap("working")
    assert timers.cpu_seconds("waiting") < 0.04 < timers.cpu_seconds("working")


@pytest.mark.parametrize("recipe", ["impala", "appo"])
def test_stages_in_turns_add_up_to_their_window(recipe: str) -> None:
    small = {"policy.hidden": (8,), "sampler.num_envs": 4} if recipe == "appo" else SMALL
    started = time.monotonic()
    figures = measure_apart(unirl.make_plan(recipe, **small), 1.0)
    seconds = sum(one["seconds"] for one in figures.values())
    assert [*figures, "end_to_end"] == list(STAGES)
    # What is left is handing slots over, and what the clocks take.
    assert 0.5 < seconds < time.monotonic() - started
    assert len({one["env_steps"] for one in figures.values()}) == 1
    for stage, one in figures.items():
        assert one["env_steps_per_second"] > 10 and one["core_us_per_env_step"] > 0, stage
    assert figures["weights"]["seconds"] < figures["inference"]["seconds"]


class WithoutTimers:
    """An actor that keeps no timers."""

    def __init__(self, actor: Actor) -> None:
        self.produce, self.close = actor.produce, actor.close


def test_an_actor_without_timers_is_one_stage() -> None:
    plan = small_plan()
    make_actor: Any = plan.pools[0].make_actor
    plan = plan.with_pool(make_actor=lambda context: WithoutTimers(make_actor(context)))
    figures = measure_apart(plan, 0.1)
    assert [*figures, "end_to_end"] == list(UNSPLIT_STAGES)
    assert figures["acting"]["seconds"] > figures["weights"]["seconds"]


def test_several_policies_cannot_be_measured_one_by_one() -> None:
    plan = small_plan(**PROCESSES)
    with pytest.raises(UniRLError, match="several policies"):
        measure_apart(replace(plan, pools=plan.pools * 2), 0.1)


# --------------------------------------------------------------------------- simulators on a device


SIM = {
    "env.id": "torch/Cartpole",
    "sim.num_envs": 32,
    "sim.unroll_length": 8,
    "sim.device": "cpu",
    "policy.hidden": (8,),
    "learner.minibatches": 1,
    "runner.learner_threads": 1,
}


def sim_plan(**overrides: Any) -> Plan:
    return unirl.make_plan("ondevice", **{**SIM, **overrides})


@pytest.mark.parametrize(("settings", "reads"), [({}, 1), ({"learner.stop_kl": 1e9}, 4)])
def test_the_host_reads_once_per_iteration(settings: dict[str, float], reads: int) -> None:
    # stop_kl waits for the device after each pass: that is what is counted, and where.
    figures = measure_apart(sim_plan(**{"learner.epochs": 3, **settings}), 0.1)
    assert [*figures, "end_to_end"] == list(STAGES)
    simulated = figures["stepping"]
    assert simulated["host_reads_per_iteration"] == reads
    assert any(line.startswith("learners/episodes.py:") for line in simulated["host_reads_at"])
    # Two physics steps of 1/120 s in one of the environment.
    assert simulated["physics_steps_per_env_step"] == 2


def test_every_way_to_read_a_tensor_is_counted_where_it_is_done() -> None:
    x = torch.arange(3.0)
    with CountHostReads() as reads:
        x.add(1).clamp_(0, 1)
        (x[0].item(), float(x[1]), bool(x[2]), x.tolist(), x.cpu(), torch.equal(x, x))
    assert reads.names == ["item", "__float__", "__bool__", "tolist", "cpu", "equal"]
    assert all(line.startswith("tests/test_bench.py:") for line in reads.lines)
    x.tolist()
    assert len(reads.names) == 6


@pytest.mark.gpu
def test_an_unroll_on_cuda_is_one_stage_and_its_host_reads_are_counted() -> None:
    figures = measure_apart(sim_plan(**{"sim.device": "cuda"}), 0.5)
    assert [*figures, "end_to_end"] == list(UNSPLIT_STAGES)
    assert figures["acting"]["host_reads_per_iteration"] == 1, figures["acting"]


@pytest.mark.parametrize(
    ("seconds", "stage", "words"),
    [
        ((8, 1, 1), "stepping", "--sim.num-envs 64"),
        ((1, 8, 2), "inference", "--sim.num-envs 64"),
        ((5, 4, 6), "learning", "--learner.epochs 4"),
    ],
)
def test_the_limit_of_a_simulated_plan_tells_simulation_and_policy_apart(
    seconds: tuple[int, int, int], stage: str, words: str
) -> None:
    plan = sim_plan()
    names: tuple[StageName, ...] = ("stepping", "inference", "learning")
    figures = {name: figures_of(1 / s, s) for name, s in zip(names, seconds, strict=True)}
    whole = figures_of(0.1, 1, cores_used=1.0, limiting_rate="production", **WAITS["production"])
    limit = find_limit(plan, {**figures, "end_to_end": whole}, 4)
    assert limit.stage == stage and words in limit.text, limit.text
    assert "--runner.kind" not in limit.text, "a device is used from one process"
    known = {flag_of(item.key) for item in fields_help(type(plan.config))}
    flags = {word.strip("()") for word in limit.text.split() if word.strip("(").startswith("--")}
    assert flags and flags <= known, "what is advised can be typed"


def test_what_is_not_installed_is_left_out_of_a_suite_with_a_sentence() -> None:
    needs = {"a": ("no_such_module", "warp"), "b": ("torch", "x"), "d": ("no_such_module", "y")}
    found = left_out(("a", "b", "c"), needs)
    assert found == {"a": "no_such_module is not installed (pip install 'unirl[warp]')"}


# ------------------------------------------------------------------------------------------- limits


def figures_of(rate: float, cost: float, **others: Any) -> Figures:
    return {"env_steps_per_second": rate, "core_us_per_env_step": cost, **others}


WAITS = {
    "production": {"learner_wait_share": 0.6, "actor_wait_share": 0.0},
    "consumption": {"learner_wait_share": 0.0, "actor_wait_share": 0.5},
}


def limit_of(plan: Plan, rate: str, cores_used: float, num_cores: int, **more: Any) -> Any:
    whole = {"cores_used": cores_used, "limiting_rate": rate, **WAITS[rate], **more}
    figures: Mapping[StageName, Figures] = {
        "stepping": figures_of(5000, 300),
        "inference": figures_of(20_000, 60),
        "learning": figures_of(8000, 200),
        "end_to_end": figures_of(3000, 600, **whole),
    }
    return find_limit(plan, figures, num_cores)


PROCESSES = {"runner.kind": "processes"}


@pytest.mark.parametrize(
    ("recipe", "overrides", "rate", "cores_used", "more", "stage", "words"),
    [
        ("impala", {}, "production", 1.0, {}, "stepping", "--runner.kind processes"),
        ("ppo", {}, "production", 1.0, {}, "stepping", "--actor.num-actors 4 --actor.num-envs 2"),
        ("impala", PROCESSES, "production", 2.0, {}, "stepping", "--actor.num-actors 2"),
        ("impala", PROCESSES, "consumption", 2.0, {}, "learning", "--runner.learner-threads 2"),
        ("impala", PROCESSES, "consumption", 3.9, {}, "stepping", "all 4 cores are busy"),
        (
            "appo", {}, "production", 2.0,
            {"env_worker_busy_share": 0.97, "policy_worker_busy_share": 0.3},
            "stepping", "--sampler.num-workers 3",
        ),
        (
            "appo", {}, "production", 2.0,
            {"env_worker_busy_share": 0.4, "policy_worker_busy_share": 0.9},
            "inference", "--sampler.num-policy-workers 2",
        ),
        ("appo", {}, "consumption", 2.0, {}, "learning", "--learner.epochs 1"),
        (
            "impala", {**PROCESSES, "env.id": "ALE/Pong-v5"}, "consumption", 2.0, {},
            "learning",
            "--policy.compute-dtype bfloat16" if has_bfloat16("cpu") else "--queue.batch-size 2",
        ),
        (
            "impala", {**PROCESSES, "env.id": "ALE/Pong-v5", "policy.compute_dtype": "bfloat16"},
            "consumption", 2.0, {}, "learning", "--queue.batch-size 2",
        ),
    ],
)  # fmt: skip
def test_the_stage_that_limits_is_named_with_a_setting_that_relieves_it(
    recipe: str,
    overrides: dict[str, Any],
    rate: str,
    cores_used: float,
    more: dict[str, float],
    stage: str,
    words: str,
) -> None:
    plan = unirl.make_plan(recipe, **overrides)
    limit = limit_of(plan, rate, cores_used, 4, **more)
    assert limit.stage == stage and words in limit.text, limit.text
    known = {flag_of(item.key) for item in fields_help(type(plan.config))}
    flags = [word for word in limit.text.split() if word.startswith("--")]
    assert flags and set(flags) <= known, "what is advised can be typed"


def test_cores_that_others_use_count_as_busy() -> None:
    plan = small_plan(**PROCESSES)
    limit = limit_of(plan, "production", 0.5, 2, cores_used_by_others=1.5)
    assert "all 2 cores are busy" in limit.text
    assert "num-actors" not in limit.text, "more processes would only compete"


def test_nothing_is_advised_where_no_setting_helps() -> None:
    plan = unirl.make_plan("impala", **{**PROCESSES, "env.id": "ALE/Pong-v5"})
    limit = limit_of(plan, "production", 3.9, 4)
    assert limit.stage == "stepping" and "--" not in limit.text and "more cores" in limit.text


def test_end_to_end_alone_still_tells_which_side_limits() -> None:
    whole = figures_of(3000, 600, cores_used=1.0, limiting_rate="production", **WAITS["production"])
    limit = find_limit(small_plan(**PROCESSES), {"end_to_end": whole}, 4)
    assert limit.stage is None and "Production limits" in limit.text


def test_a_table_is_aligned_and_numbers_are_right_aligned() -> None:
    assert plain_lines(["stage", "rate", ""], [["a", "1,000", "why"], ["learning", "7", ""]]) == [
        "stage      rate",
        "a         1,000  why",
        "learning      7",
    ]


# ------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("recipe", "num_envs"), [("impala", "actor.num_envs"), ("appo", "sampler.num_envs")]
)
def test_no_shape_changes_the_samples_per_update_or_exceeds_the_cores(
    recipe: str, num_envs: str
) -> None:
    config = unirl.make_plan(recipe).config
    start = start_of(config, 6)
    seen: list[Shape] = []

    def attempt(shape: Shape) -> Tried:
        seen.append(shape)
        return Tried(shape, figures_of(100 * 1.5 ** len(seen), 1))  # each is faster than before

    search(start, knobs_of(config, 6), attempt)
    assert len(seen) == len({tuple(shape.items()) for shape in seen}) > 6
    samples = {shape[num_envs] * shape["queue.batch_size"] for shape in seen}
    assert samples == {start[num_envs] * start["queue.batch_size"]}
    counts = [key for key in start if key.endswith(("actors", "workers", "threads"))]
    assert max(shape[key] for shape in seen for key in counts) == 6
    seen.clear()
    search(start, knobs_of(config, 6, free_batch=True), attempt)  # it ends
    free = {shape[num_envs] * shape["queue.batch_size"] for shape in seen}
    assert len(free) > 1 and max(free) <= 4096


@pytest.mark.parametrize(
    ("recipe", "num_envs"), [("impala", "actor.num_envs"), ("ondevice", "sim.num_envs")]
)
def test_environments_that_step_together_are_tried_by_the_thousand(
    recipe: str, num_envs: str
) -> None:
    config = unirl.make_plan(recipe).config
    start = start_of(config, 2)

    def tried(**how: bool) -> set[int]:
        knobs = knobs_of(config, 2, **how)
        return {shape[num_envs] for knob in knobs for shape in knob(start)}

    assert {1024, 2048, 4096} <= tried(free_batch=True, vectorised=True)
    assert tried(vectorised=True) == {start[num_envs]} | tried()


def test_actors_that_wait_may_be_more_than_the_cores() -> None:
    config = unirl.make_plan("impala", **{**PROCESSES, "actor.num_actors": 2}).config
    waiting = replace(config, actor=replace(config.actor, num_actors=16))
    for each, most in ((config, 2), (waiting, 32)):
        start = start_of(each, 2)
        shapes = [shape for knob in knobs_of(each, 2) for shape in knob(start)]
        assert max(shape["actor.num_actors"] for shape in shapes) == most
        assert max(shape["runner.learner_threads"] for shape in shapes) == 2


def test_the_search_follows_what_is_faster_and_keeps_what_is_as_fast() -> None:
    config = unirl.make_plan("appo", **{"queue.batch_size": 8}).config
    start = start_of(config, 4)

    def attempt(shape: Shape) -> Tried:
        if shape["sampler.num_groups"] == 4:
            return Tried(shape, None, "too many groups")
        noise = 1.01 if shape["runner.learner_threads"] == 4 else 1.0
        return Tried(shape, figures_of(noise * 10 * min(shape["sampler.num_envs"], 64), 1))

    tried, best = search(start, knobs_of(config, 4), attempt)
    assert best.shape == {**start, "sampler.num_envs": 64, "queue.batch_size": 2}
    assert [one.reason for one in tried if one.figures is None] == ["too many groups"]
    with pytest.raises(UniRLError, match="too many"):
        search(start, [], lambda shape: Tried(shape, None, "too many"))


def test_only_plans_whose_production_is_known_have_a_shape() -> None:
    with pytest.raises(UniRLError, match="no shape"):
        start_of(object(), 2)


# ------------------------------------------------------------------------------------ command line


def test_suites_consist_of_shipped_configs() -> None:
    named = {config for _, suite in SUITES.values() for config in suite}
    assert named <= set(shipped_configs())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What one `unirl bench appo --json` prints, of a plan with environment workers."""
    cwd, words = tmp_path_factory.mktemp("bench"), ["appo", "--seconds", "0.5", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        code, printed = called("bench", *words, "--sampler.num-envs", "4")
    assert code == 0 and not list(cwd.iterdir())
    found: Mapping[str, Any] = json.loads(printed)
    return found


def called(*words: str) -> tuple[int, str]:
    """Exit code and standard output of a command, run in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(list(words))
    return code, out.getvalue()


def test_bench_measures_all_stages_of_workers_and_says_what_limits_them(
    report: Mapping[str, Any],
) -> None:
    assert report["suite"] is None and report["seconds"] == 0.5
    (plan,) = report["plans"]
    assert (plan["recipe"], plan["env"], plan["runner"]) == ("appo", "CartPole-v1", "processes")
    assert list(plan["stages"]) == list(STAGES) and plan["not_measured"] is None
    for stage, figures in plan["stages"].items():
        assert figures["env_steps_per_second"] > 10, stage
        assert 0 < figures["core_us_per_env_step"] < 1e5, stage
        assert 50 < figures["peak_memory_mb"] < 3000, stage
    whole = plan["stages"]["end_to_end"]
    assert whole["seconds"] >= 0.5
    assert 0 <= whole["staleness_mean"] <= whole["staleness_max"] <= 3
    assert 4 <= whole["rows_per_forward"] <= 16
    assert plan["limit"]["stage"] in STAGES and "Try --" in plan["limit"]["text"]


def test_a_report_is_printed_as_a_table_with_what_limits_below(
    report: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report["plans"][0])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "appo CartPole-v1 processes" and header.endswith("staleness mean, max")
    assert "physics" not in header
    assert [row.split("  ")[0] for row in rows[:5]] == [name.replace("_", " ") for name in STAGES]
    assert rows[5] == report["plans"][0]["limit"]["text"]


def test_environment_steps_and_physics_steps_are_distinguished(
    report: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {**report["plans"][0]["stages"]}
    stages["stepping"] = {
        **stages["stepping"],
        "physics_steps_per_env_step": 2,
        "host_reads_per_iteration": 1.0,
        "host_reads_at": ["learners/episodes.py:47"],
    }
    stages["stepping"]["env_steps_per_second"] = stages["end_to_end"]["env_steps_per_second"] = 1e3
    print_report({**report["plans"][0], "stages": stages})
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert "physics steps/s" in header
    for row in (rows[0], rows[4]):
        assert row.split("  ")[1:] and "2,000" in row
    assert "2,000" not in rows[1]
    assert "Host reads: 1 per iteration (learners/episodes.py:47)." in rows


def test_tune_writes_a_config_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(plan: Plan, seconds: float) -> dict[StageName, Figures]:
        if plan.runner.kind == "processes":
            raise UniRLError("no processes here")
        return {"end_to_end": {**measure_end_to_end(plan, seconds, tmp_path), "peak_memory_mb": 1}}

    monkeypatch.chdir(tmp_path)
    words = ["ppo", "--seconds", "0.1", "--actor.num-envs", "1", "--out", "tuned.toml"]
    words += ["--actor.unroll-length", "16", "--learner.minibatches", "1"]
    assert tune(words, measure=measure) == 0
    printed = capsys.readouterr().out
    table = printed.splitlines()
    assert table[1].split()[0].rstrip(",") == "current"
    assert any(line.endswith("no processes here") for line in table)
    assert "fastest" in printed and "learning is not changed" in printed
    assert "wrote tuned.toml" in table[-1]
    assert called("train", "@tuned.toml", "--dry-run")[0] == 0
    code, resolved = called("train", "@tuned.toml", "--dry-run")
    assert code == 0 and "num_envs = 1\n" in resolved and 'recipe = "ppo"' in resolved


def test_what_ends_a_measurement_is_explained_in_three_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nan_env.py").write_text(
        "import gymnasium, numpy\n"
        "class Nan(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (1,), numpy.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return numpy.zeros(1, numpy.float32), {}\n"
        "    def step(self, action):\n"
        "        return numpy.full(1, numpy.nan, numpy.float32), 0.0, False, False, {}\n"
        "gymnasium.register('Nan-v0', Nan)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    words = ["impala", "--env.import-module", "nan_env", "--env.id", "Nan-v0", "--json"]
    assert cli.main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    parts = said.splitlines()
    assert len(parts) == 3 and 'env "Nan-v0" returned nan' in parts[0], said
    assert list((tmp_path / "temporary").glob("unirl-bench-*/output.txt")), "the logs stay"


def test_nothing_of_a_benchmark_is_to_be_resumed() -> None:
    died = ActorFailed(
        "actor 0 died: ValueError: no",
        "it was restarted 3 of 3 times (runner.max_restarts)",
        "full trace: the run's log.txt; correct the environment or actor, then `unirl resume`",
    )
    *_, remedy = without_run(died, Path("/tmp/x/output.txt")).parts
    assert remedy.startswith("full trace: /tmp/x/output.txt; ")
    assert remedy.endswith("then measure again")


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd)}
    return subprocess.Popen(
        [sys.executable, "-m", "unirl", "bench", *words, "--seconds", "60", "--json"],
        cwd=cwd,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it puts in the background with Ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_nothing_runs_on_when_it_is_interrupted_or_killed() -> None:
    # The fork server's socket is in TMPDIR, and a socket's path has at most 107 characters.
    folders = [Path(tempfile.mkdtemp(prefix=name)) for name in ("interrupted", "killed")]
    # The command, its measurement, the fork server, a policy worker, two environment workers; and
    # the command with its measurement.
    running = [
        (started("appo", cwd=folders[0]), 6, signal.SIGINT, 130),
        (started("impala", cwd=folders[1]), 2, signal.SIGKILL, -9),
    ]
    seen: dict[int, usage.ProcessInfo] = {}
    try:
        for process, num_processes, number, code in running:
            # Beside other work they may take long to load torch.
            deadline, tree = time.monotonic() + 200, usage.tree(process.pid)
            while len(usage.alive(tree)) < num_processes:
                assert time.monotonic() < deadline
                if process.poll() is not None and process.stderr is not None:
                    pytest.fail(f"it ended by itself: {process.stderr.read()}")
                time.sleep(0.1)
                tree = usage.tree(process.pid)
            seen |= tree
            os.killpg(process.pid, number)
            assert process.wait(60) == code
            assert process.stderr is not None and "Traceback" not in process.stderr.read()
        assert not list(folders[0].iterdir())
        deadline = time.monotonic() + 20
        while left := usage.alive(seen):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for process, *_ in running:
            seen |= usage.tree(process.pid)
            process.kill()
            process.wait()
        usage.kill(seen)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

"""Measuring: stages are what they say, the verdict fits the figures, nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
from unirl.bench.errors import Unmeasurable, parts_of
from unirl.bench.forward import inference_plan
from unirl.bench.host_reads import CountHostReads
from unirl.bench.limits import find_limit
from unirl.bench.parts import policies_in
from unirl.bench.repeat import KeepingLearner
from unirl.bench.replay import ReplayPolicy, sampling_plan
from unirl.bench.shapes import Shape, Tried, knobs_of, search, start_of
from unirl.bench.simulate import acting_plan, make_random_actor, simulation_plan
from unirl.bench.stages import SIM_STAGES, STAGES, Figures, StageName, measure
from unirl.bench.stopwatch import Stopwatch
from unirl.bench.table import plain_lines
from unirl.commands.bench import SUITES, Suite, left_out
from unirl.commands.shipped import shipped_configs
from unirl.config import fields_help, flag_of
from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext
from unirl.core.sample import Batch, SampleSpec, Slot
from unirl.core.weights import LocalWeightStore
from unirl.errors import ActorFailed, UniRLError
from unirl.policy import Policy
from unirl.policy.precision import has_bfloat16
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan

ROOT = Path(cli.__file__).resolve().parent.parent
SMALL = {"actor.num_envs": 4, "actor.unroll_length": 8, "runner.learner_threads": 1}


def small_plan(recipe: str = "impala", **overrides: Any) -> Plan:
    return unirl.make_plan(recipe, **{**SMALL, **overrides})


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "unirl", *words]


def surroundings(**settings: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}


def alone(*words: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=cwd,
        env=surroundings(**settings),
        capture_output=True,
        text=True,
        timeout=200,
    )


class StopAfter:
    """Ends a loop after some updates, and keeps what the slots held."""

    def __init__(self, num_updates: int) -> None:
        self.num_updates = num_updates

    def after_update(self, loop: TrainLoop) -> None:
        if loop.learner.version >= self.num_updates:
            loop.stop("enough")

    def at_end(self, loop: TrainLoop) -> None: ...


# ------------------------------------------------------------------------------------------ stages


def test_the_window_excludes_what_came_before_it() -> None:
    begun: list[int] = []
    stopwatch = Stopwatch(0.1, 0.05, lambda: begun.append(1))
    num_steps = 1_000_000  # of a warm-up that was far faster
    while not stopwatch.tick(num_steps):
        time.sleep(0.01)
        num_steps += 10
    figures = stopwatch.figures()
    assert begun == [1]
    assert 0.1 <= figures["seconds"] < 1
    assert 0 < figures["env_steps_per_second"] <= 1000
    assert figures["env_steps"] % 10 == 0


def test_sampling_alone_steps_real_environments_and_decides_nothing() -> None:
    runner = InlineRunner(sampling_plan(small_plan()))
    runner.run([StopAfter(20)])
    # Episodes of CartPole end, and their filler rows are no steps.
    assert 0.8 * 20 * 4 * 8 < runner.loop.learner.num_steps <= 20 * 4 * 8
    assert set(runner.loop.learner.weights()) == {"none"}


def test_a_replay_repeats_actions_of_its_policy_and_leaves_states_alone() -> None:
    plan = small_plan(**{"policy.core": "gru"})
    (_, _, policy), *_ = policies_in(plan.make_learner(LearnerContext(0)))
    calls: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            calls.append(1) if name in ("act", "act_groups") else None
            return getattr(policy, name)

    replay = ReplayPolicy(Watched())  # type: ignore[arg-type]
    obs, generators = torch.randn(8, 4), [torch.Generator().manual_seed(i) for i in range(2)]
    state = {name: value + 1 for name, value in policy.initial_state(8).items()}
    seen = set()
    for _ in range(100):
        for i, result in enumerate(replay.act_groups(obs, state, generators)):
            assert result.action.shape == result.logp.shape == (4,)
            for name, value in result.state.items():
                assert torch.equal(value, state[name][4 * i : 4 * i + 4])
            seen.add(tuple(result.action.tolist()))
    assert 0 < len(calls) < 40, "it decides at first and never again"
    assert len(seen) > 4, "actions differ"


def test_inference_alone_is_the_forward_pass_of_the_plans_act_batch() -> None:
    vector = inference_plan(small_plan()).make_actor
    assert vector.keywords["rows"].total == 4  # type: ignore[attr-defined]
    sampler = unirl.make_plan("appo", **{"sampler.num_envs": 8})
    grouped = inference_plan(sampler, rows_per_forward=22.9).make_actor
    assert grouped.keywords["rows"].total == 24  # type: ignore[attr-defined]
    runner = InlineRunner(inference_plan(small_plan()))
    runner.run([StopAfter(3)])
    assert runner.loop.learner.num_steps > 3 and runner.loop.learner.num_steps % 4 == 0


def test_learning_alone_repeats_one_batch_and_never_drifts_away() -> None:
    plan = small_plan(**{"learner.optimizer.lr": 0.01})
    learner = KeepingLearner(plan.make_learner(LearnerContext(0)))
    data = plan.spec.allocate()
    data["obs"].normal_()
    data["logp"].fill_(-0.7)
    data["reward"].fill_(1.0)
    data["mask"].fill_(True)
    learner.step(Batch([Slot(0, 0, data, first_version=0, last_version=0)], 0))
    data["obs"].fill_(float("nan"))  # the place is given back: others write to it
    before = {name: value.clone() for name, value in learner.weights().items()}
    first_round = []
    for i in range(41):
        learner.repeat()
        if i in (0, 20, 40):
            first_round.append({name: v.clone() for name, v in learner.weights().items()})
    assert learner.num_steps == 42 * 4 * 8
    assert any(not torch.equal(value, before[name]) for name, value in first_round[0].items())
    for name, value in first_round[0].items():
        assert torch.allclose(first_round[1][name], value, atol=1e-3), name
        assert torch.allclose(first_round[2][name], value, atol=1e-3), name


def test_slots_that_are_no_unrolls_cannot_be_taken_apart() -> None:
    plan = small_plan()
    fields = {name: item for name, item in plan.spec.fields.items() if name != "mask"}
    with pytest.raises(Unmeasurable, match="no mask"):
        sampling_plan(replace(plan, spec=SampleSpec(fields)))
    with pytest.raises(Unmeasurable, match="holds no"):
        policies_in(StopAfter(1))


def test_the_policy_of_every_group_is_found() -> None:
    plan = unirl.make_plan("appo", **{"sampler.num_envs": 4})
    actor = plan.make_actor(ActorContext(0, 1, 0, LocalWeightStore()))
    found = policies_in(actor)
    actor.close()
    assert len(found) == 4 and len({id(holder) for holder, _, _ in found}) == 4
    assert all(isinstance(policy, Policy) for _, _, policy in found)


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


def test_simulation_alone_takes_random_actions_and_no_decision() -> None:
    plan = sim_plan()
    store = LocalWeightStore()
    store.publish({"none": torch.zeros(1)}, 0)  # no policy could load these
    actor = make_random_actor(ActorContext(0, 1, 5, store), make=plan.make_actor)
    slot = Slot(0, 0, plan.spec.allocate())
    actor.produce(slot)  # type: ignore[union-attr]
    actor.close()
    action, obs = slot.data["action"], slot.data["obs"]
    # Uniform, where those of a new policy are normal.
    assert action.abs().max() <= 1 and 0.4 < action.abs().mean() < 0.6
    assert action.std(1).min() > 0.4 and not torch.equal(action[0], action[1])
    assert not torch.equal(obs[0], obs[-1])


@pytest.mark.parametrize("alone", [simulation_plan, acting_plan])
def test_a_simulator_without_learning_counts_its_steps_and_learns_nothing(alone: Any) -> None:
    plan = sim_plan()
    runner = InlineRunner(alone(plan))
    runner.run([StopAfter(5)])
    assert runner.loop.learner.num_steps == 5 * 32 * 8
    if alone is acting_plan:
        weights, first = runner.loop.learner.weights(), plan.make_learner_seeded().weights()
        assert all(torch.equal(weights[name], value) for name, value in first.items())


@pytest.mark.parametrize(("settings", "reads"), [({}, 1), ({"learner.stop_kl": 1e9}, 4)])
def test_the_host_reads_once_per_iteration(
    settings: dict[str, float], reads: int, tmp_path: Path
) -> None:
    # stop_kl waits for the device after each pass: that is what is counted, and where.
    plan, threads = sim_plan(**{"learner.epochs": 3, **settings}), torch.get_num_threads()
    try:
        whole = measure("end_to_end", plan, 0.1, tmp_path, lambda: None)
    finally:
        torch.set_num_threads(threads)
    assert whole["host_reads_per_iteration"] == reads
    assert any(place.startswith("learners/episodes.py:") for place in whole["host_reads_at"])
    # Two physics steps of 1/120 s in one of the environment.
    assert whole["physics_steps_per_second"] == 2 * whole["env_steps_per_second"]


def test_every_way_to_read_a_tensor_is_counted_where_it_is_done() -> None:
    x = torch.arange(3.0)
    with CountHostReads() as reads:
        x.add(1).clamp_(0, 1)
        (x[0].item(), float(x[1]), bool(x[2]), x.tolist(), x.cpu(), torch.equal(x, x))
    assert reads.names == ["item", "__float__", "__bool__", "tolist", "cpu", "equal"]
    assert all(place.startswith("tests/test_bench.py:") for place in reads.places)
    x.tolist()
    assert len(reads.names) == 6


@pytest.mark.gpu
def test_cuda_tells_its_host_reads(tmp_path: Path) -> None:
    whole = measure("end_to_end", sim_plan(**{"sim.device": "cuda"}), 0.5, tmp_path, lambda: None)
    assert whole["host_reads_per_iteration"] == 1, whole["host_reads_at"]


@pytest.mark.parametrize(
    ("seconds", "stage", "words"),
    [
        ((8, 9, 1), "simulation", "--sim.num-envs 64"),
        ((1, 9, 2), "simulation_with_policy", "--sim.num-envs 64"),
        ((5, 9, 6), "learning", "--learner.epochs 4"),
    ],
)
def test_the_limit_of_a_simulated_plan_tells_simulation_and_policy_apart(
    seconds: tuple[int, int, int], stage: str, words: str
) -> None:
    plan = sim_plan()
    figures = {name: figures_of(1 / s, s) for name, s in zip(SIM_STAGES, seconds, strict=False)}
    whole = figures_of(0.1, 1, cores_used=1.0, limiting_rate="production", **WAITS["production"])
    limit = find_limit(plan, {**figures, "end_to_end": whole}, 4)
    assert limit.stage == stage and words in limit.text, limit.text
    assert "--runner.kind" not in limit.text, "a device is used from one process"
    known = {flag_of(item.key) for item in fields_help(type(plan.config))}
    flags = {word.strip("()") for word in limit.text.split() if word.strip("(").startswith("--")}
    assert flags and flags <= known, "what is advised can be typed"


def test_what_is_not_installed_is_left_out_of_a_suite_with_a_sentence() -> None:
    suite = Suite("", ("a", "b"), needs={"a": ("no_such_module", "warp"), "b": ("torch", "x")})
    assert left_out(suite) == {"a": "no_such_module is not installed (pip install 'unirl[warp]')"}


# ----------------------------------------------------------------------------------------- verdict


def figures_of(rate: float, cost: float, **others: Any) -> Figures:
    return {"env_steps_per_second": rate, "core_us_per_env_step": cost, **others}


WAITS = {
    "production": {"learner_wait_share": 0.6, "actor_wait_share": 0.0},
    "consumption": {"learner_wait_share": 0.0, "actor_wait_share": 0.5},
}


def verdict(plan: Plan, rate: str, cores_used: float, num_cores: int, **more: Any) -> Any:
    whole = {"cores_used": cores_used, "limiting_rate": rate, **WAITS[rate], **more}
    figures: Mapping[StageName, Figures] = {
        "sampling": figures_of(5000, 300),
        "inference": figures_of(20_000, 60),
        "learning": figures_of(8000, 200),
        "end_to_end": figures_of(3000, 600, **whole),
    }
    return find_limit(plan, figures, num_cores)


PROCESSES = {"runner.kind": "processes"}


@pytest.mark.parametrize(
    ("recipe", "overrides", "rate", "cores_used", "more", "stage", "words"),
    [
        ("impala", {}, "production", 1.0, {}, "sampling", "--runner.kind processes"),
        ("ppo", {}, "production", 1.0, {}, "sampling", "--actor.num-actors 4 --actor.num-envs 2"),
        ("impala", PROCESSES, "production", 2.0, {}, "sampling", "--actor.num-actors 2"),
        ("impala", PROCESSES, "consumption", 2.0, {}, "learning", "--runner.learner-threads 2"),
        ("impala", PROCESSES, "consumption", 3.9, {}, "sampling", "all 4 cores are busy"),
        (
            "appo", {}, "production", 2.0,
            {"env_worker_busy_share": 0.97, "policy_worker_busy_share": 0.3},
            "sampling", "--sampler.num-workers 3",
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
    limit = verdict(plan, rate, cores_used, 4, **more)
    assert limit.stage == stage and words in limit.text, limit.text
    known = {flag_of(item.key) for item in fields_help(type(plan.config))}
    flags = [word for word in limit.text.split() if word.startswith("--")]
    assert flags and set(flags) <= known, "what is advised can be typed"


def test_full_cores_are_full_whoever_uses_them() -> None:
    plan = small_plan(**PROCESSES)
    limit = verdict(plan, "production", 0.5, 2, cores_used_by_others=1.5)
    assert "all 2 cores are busy" in limit.text
    assert "num-actors" not in limit.text, "more processes would only get into each other's way"


def test_nothing_is_advised_where_no_setting_helps() -> None:
    plan = unirl.make_plan("impala", **{**PROCESSES, "env.id": "ALE/Pong-v5"})
    limit = verdict(plan, "production", 3.9, 4)
    assert limit.stage == "sampling" and "--" not in limit.text and "more cores" in limit.text


def test_end_to_end_alone_still_tells_which_side_limits() -> None:
    whole = figures_of(3000, 600, cores_used=1.0, limiting_rate="production", **WAITS["production"])
    limit = find_limit(small_plan(**PROCESSES), {"end_to_end": whole}, 4)
    assert limit.stage is None and "Production limits" in limit.text


def test_a_table_is_aligned_and_numbers_stand_right() -> None:
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
        return Tried(shape, float(100 * 1.5 ** len(seen)))  # whatever comes later is faster

    search(start, knobs_of(config, 6), attempt)
    assert len(seen) == len({tuple(shape.items()) for shape in seen}) > 6
    samples = {shape[num_envs] * shape["queue.batch_size"] for shape in seen}
    assert samples == {start[num_envs] * start["queue.batch_size"]}
    counts = [key for key in start if key.endswith(("actors", "workers", "threads"))]
    assert max(shape[key] for shape in seen for key in counts) == 6
    free = {
        shape[num_envs] * shape["queue.batch_size"]
        for knob in knobs_of(config, 6, free_batch=True)
        for shape in knob(start)
    }
    assert len(free) > 1


def test_the_search_follows_what_is_faster_and_keeps_what_is_as_fast() -> None:
    config = unirl.make_plan("appo", **{"queue.batch_size": 8}).config
    start = start_of(config, 4)

    def attempt(shape: Shape) -> Tried:
        if shape["sampler.num_groups"] == 4:
            return Tried(shape, None, "too many groups")
        noise = 1.01 if shape["runner.learner_threads"] == 4 else 1.0
        return Tried(shape, noise * 10 * min(shape["sampler.num_envs"], 64))

    tried, best = search(start, knobs_of(config, 4), attempt)
    assert best.shape == {**start, "sampler.num_envs": 64, "queue.batch_size": 2}
    assert [one.reason for one in tried if one.rate is None] == ["too many groups"]
    with pytest.raises(UniRLError, match="too many"):
        search(start, [], lambda shape: Tried(shape, None, "too many"))


def test_only_plans_whose_production_is_known_have_a_shape() -> None:
    with pytest.raises(UniRLError, match="no shape"):
        start_of(StopAfter(1), 2)


# ------------------------------------------------------------------------------------ command line


def test_suites_consist_of_shipped_configs() -> None:
    named = {config for suite in SUITES.values() for config in suite.configs}
    assert named <= set(shipped_configs())


def test_bench_measures_all_stages_of_workers_and_says_what_limits_them(tmp_path: Path) -> None:
    words = ["bench", "appo", "--seconds", "0.5", "--json", "--sampler.num-envs", "4"]
    done = alone(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["suite"] is None and report["seconds"] == 0.5
    (plan,) = report["plans"]
    assert (plan["recipe"], plan["env"], plan["runner"]) == ("appo", "CartPole-v1", "processes")
    assert list(plan["stages"]) == list(STAGES) and plan["not_measured"] == {}
    for stage, figures in plan["stages"].items():
        assert figures["seconds"] >= 0.5, stage
        assert figures["env_steps_per_second"] > 50, stage
        assert 0 < figures["core_us_per_env_step"] < 1e5, stage
        assert 50 < figures["peak_memory_mb"] < 3000, stage
    whole = plan["stages"]["end_to_end"]
    assert 0 <= whole["staleness_mean"] <= whole["staleness_max"] <= 3
    assert 4 <= whole["rows_per_forward"] <= 16
    assert plan["limit"]["stage"] in STAGES and "Try --" in plan["limit"]["text"]
    assert not list(tmp_path.iterdir())


def test_bench_tells_environment_steps_and_physics_steps_apart(tmp_path: Path) -> None:
    words = [
        word
        for key, value in SIM.items()
        if key != "policy.hidden"
        for word in (flag_of(key), str(value))
    ]
    done = alone("bench", "ondevice", *words, "--seconds", "0.3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    title, header, *rows = done.stdout.splitlines()
    assert title == "ondevice torch/Cartpole inline" and "physics steps/s" in header
    assert [row.split("  ")[0] for row in rows[:4]] == [
        name.replace("_", " ") for name in SIM_STAGES
    ]
    assert "Host reads: 1 per iteration (learners/episodes.py" in done.stdout


def test_tune_writes_a_config_that_trains(tmp_path: Path) -> None:
    # One core and one environment: there is little to try.
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from unirl.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["tune", "ppo", "--seconds", "0.3", "--actor.num-envs", "1", "--out", "tuned.toml"]
    words += ["--actor.unroll-length", "16", "--learner.minibatches", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=surroundings(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert [line.split()[0].rstrip(",") for line in table[1:2]] == ["current"]
    assert "fastest" in done.stdout and "learning is not changed" in done.stdout
    assert "wrote tuned.toml" in table[-1]
    resolved = alone("train", "@tuned.toml", "--dry-run", cwd=tmp_path)
    assert resolved.returncode == 0, resolved.stderr
    assert "num_envs = 1\n" in resolved.stdout and 'recipe = "ppo"' in resolved.stdout


def test_what_ends_a_stage_is_told_in_three_parts(tmp_path: Path) -> None:
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
    words = ["bench", "impala", "--env.import-module", "nan_env", "--env.id", "Nan-v0", "--json"]
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    # Its logs stay, for whoever wants to know more.
    done = alone(*words, cwd=tmp_path, PYTHONPATH=path, TMPDIR=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    parts = done.stderr.splitlines()
    assert len(parts) == 3 and 'env "Nan-v0" returned nan' in parts[0], done.stderr


def test_nothing_of_a_benchmark_is_to_be_resumed() -> None:
    died = ActorFailed(
        "actor 0 died: ValueError: no",
        "it was restarted 3 of 3 times (runner.max_restarts)",
        "full trace: the run's log.txt; mend the environment or actor, then `unirl resume`",
    )
    *_, remedy = parts_of(died, Path("/tmp/x/stage.txt"))
    assert (
        remedy == "full trace: /tmp/x/stage.txt; mend the environment or actor, then measure again"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_runs_on_when_it_is_interrupted_or_killed(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        command("bench", "appo", "--seconds", "60", "--json"),
        cwd=tmp_path,
        env=surroundings(TMPDIR=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what it puts in the background with Ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        seen: dict[int, usage.ProcessInfo] = {}
        deadline = time.monotonic() + 60
        # The command, its stage, the fork server, a policy worker, two environment workers.
        while len(usage.alive(seen)) < 6:
            assert time.monotonic() < deadline and process.poll() is None
            seen = usage.tree(process.pid)
            time.sleep(0.1)
        os.killpg(process.pid, number)
        assert process.wait(60) == code
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        if number == signal.SIGINT:
            assert not list(tmp_path.iterdir())
        deadline = time.monotonic() + 20
        while left := usage.alive(seen):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        usage.kill(seen)
        process.kill()
        process.wait()

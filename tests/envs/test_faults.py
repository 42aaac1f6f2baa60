"""What goes wrong with environments is reported in three parts, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from tests import forked
from tests.toy_envs import toy_env
from unirl.envs.config import EnvConfig
from unirl.envs.make import known_env_ids, make_vec, spaces
from unirl.envs.obs_check import check_finite
from unirl.errors import EnvCrashed, UniRLError

ROOT = Path(__file__).resolve().parents[2]


def fault(engine: Any = "sync", **kwargs: Any) -> EnvConfig:
    return toy_env("Fault", engine, kwargs=kwargs)


def steps(env: Any, count: int) -> None:
    for _ in range(count):
        env.step(np.zeros(env.num_envs, dtype=np.int64))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvConfig("ALE/Pnog-v5"), r'env "ALE/Pnog-v5" is unknown\. Did you mean "ALE/Pong-v5"'),
        (EnvConfig("cartpole-v1"), r'Did you mean "CartPole-v1"'),
        (EnvConfig("CartPole-v1", "ale"), "engine ale cannot run"),
        (EnvConfig("Acrobot-v1", "vector"), "has no vector class"),
        (EnvConfig("CartPole-v1", kwargs={"gravitas": 1}), "does not take .*gravitas"),
        (EnvConfig("Acrobot-v1", kwargs={"gravitas": 1}), "does not take .*gravitas"),
        (toy_env("Counting", max_episode_steps=5), "env.max_episode_steps, which is 5"),
        (EnvConfig("CartPole-v1", import_module="no_such_envs"), '"no_such_envs" that should'),
        (EnvConfig("CartPole-v1", import_module="no_such.envs"), '"no_such.envs" that should'),
        (EnvConfig("CartPole-v1", import_module="gymnasium.no_such"), "that should register"),
    ],
    ids=lambda value: value.id if isinstance(value, EnvConfig) else "",
)
def test_bad_input_is_explained_in_three_parts(config: EnvConfig, message: str) -> None:
    with pytest.raises(UniRLError, match=message) as caught:
        make_vec(config, 2)
    assert len(caught.value.parts) == 3


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_an_id_with_a_vector_class_alone_has_no_single_environments(engine: Any) -> None:
    gymnasium.register("unirl-test/Vector-v0", vector_entry_point="tests.toy_envs:CountingVector")
    try:
        assert make_vec(EnvConfig("unirl-test/Vector-v0"), 2).num_envs == 2
        with pytest.raises(UniRLError, match=r'vector_entry_point alone.* use engine="vector"'):
            make_vec(EnvConfig("unirl-test/Vector-v0", engine), 2)
    finally:
        del gymnasium.registry["unirl-test/Vector-v0"]


def test_an_id_unknown_to_envpool_is_explained_from_its_own_list() -> None:
    pytest.importorskip("envpool", reason="the extra envpool is not installed")
    with pytest.raises(UniRLError, match='Did you mean "HalfCheetah-v4"'):
        make_vec(EnvConfig("HalfChetah-v4", "envpool"), 1)
    with pytest.raises(UniRLError, match=r"sets batch_size, seed"):
        make_vec(EnvConfig("CartPole-v1", "envpool", kwargs={"seed": 1, "batch_size": 1}), 1)


@pytest.mark.parametrize(
    "setting",
    [
        {"engine": "warp"},
        {"id": ""},
        {"repeat_action_probability": 1.5},
        {"frame_skip": 0},
        {"frame_stack": 0},
        {"frame_size": 0},
        {"num_threads": -1},
        {"noop_max": -1},
        {"max_episode_steps": 0},
        {"step_timeout": 0.0},
        {"import_module": ".envs"},
    ],
    ids=str,
)
def test_a_config_out_of_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UniRLError) as caught:
        EnvConfig(**setting)
    assert len(caught.value.parts) == 3


def test_no_environments_is_refused() -> None:
    with pytest.raises(UniRLError, match="at least 1"):
        make_vec(EnvConfig(), 0)


def make_without_packages() -> None:
    """Make environments whose packages are missing, and print what is said."""
    warnings.simplefilter("ignore")
    for name in ("ale_py", "mujoco", "envpool", "Box2D"):
        assert name not in sys.modules
        sys.modules[name] = None  # type: ignore[assignment]
    environments: list[tuple[str, Any]] = [
        ("ALE/Pong-v5", "auto"),
        ("HalfCheetah-v5", "auto"),
        ("CartPole-v1", "envpool"),
        ("HalfCheetah-v4", "envpool"),
        ("LunarLander-v3", "auto"),
    ]
    for env_id, engine in environments:
        try:
            make_vec(EnvConfig(env_id, engine), 1)
        except UniRLError as error:
            print(env_id, len(error.parts), error.remedy)
    print("CartPole-v1" in known_env_ids(), "ALE/Pong-v5" in known_env_ids())


def test_a_missing_package_names_the_extra_to_install(tmp_path: Path) -> None:
    # In a process of its own, where the packages cannot be imported, as if they were not installed.
    process = forked.start(make_without_packages, output=tmp_path / "said.txt")
    process.join(120)
    said = (tmp_path / "said.txt").read_text()
    assert said.splitlines() == [
        "ALE/Pong-v5 3 pip install 'unirl[atari]'",
        "HalfCheetah-v5 3 pip install 'unirl[mujoco]'",
        "CartPole-v1 3 pip install 'unirl[envpool]'",
        "HalfCheetah-v4 3 pip install 'unirl[envpool]'",
        "LunarLander-v3 3 pip install 'unirl[box2d]'",
        "True False",
    ], said


def test_a_module_is_imported_first_to_register_its_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_envs_for_test.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('mine/Mine-v0', entry_point='unirl.envs.games.recall_cue:RecallCue')\n"
    )
    (tmp_path / "broken_envs_for_test.py").write_text("import not_there_at_all\n")
    (tmp_path / "wrong_envs_for_test.py").write_text("from gymnasium import not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    obs, action = spaces(EnvConfig("mine/Mine-v0", import_module="my_envs_for_test"))
    assert obs.shape == (4,)
    assert action.n == 3  # type: ignore[attr-defined]
    # A module that is there but lacks something: it is named, and not the module.
    with pytest.raises(UniRLError, match="not_there_at_all") as caught:
        make_vec(EnvConfig("mine/Mine-v0", import_module="broken_envs_for_test"), 1)
    assert len(caught.value.parts) == 3
    with pytest.raises(UniRLError, match=r'"wrong_envs_for_test" .* cannot be imported') as caught:
        make_vec(EnvConfig("mine/Mine-v0", import_module="wrong_envs_for_test"), 1)
    assert len(caught.value.parts) == 3


def test_envpool_imports_the_module_too() -> None:
    pytest.importorskip("envpool", reason="the extra envpool is not installed")
    with pytest.raises(UniRLError, match='"no_such_envs" that should'):
        make_vec(EnvConfig("CartPole-v1", "envpool", import_module="no_such_envs"), 1)


def test_the_list_of_ids_holds_what_can_be_made() -> None:
    ids = known_env_ids()
    assert ids == sorted(set(ids))
    assert {"CartPole-v1", "unirl/RecallCue-v0"} <= set(ids)


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_an_error_in_step_propagates_as_it_was_raised(engine: Any) -> None:
    env = make_vec(fault(engine, raise_at=3), 2)
    env.reset(0)
    steps(env, 2)
    with pytest.raises(RuntimeError, match="fault at step 3, as asked for"):
        steps(env, 1)
    env.close()


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_an_observation_of_the_wrong_shape_is_named(engine: Any) -> None:
    env = make_vec(fault(engine, shape_at=2), 2)
    env.reset(0)
    steps(env, 1)
    with pytest.raises(UniRLError, match=r"\(2,\), received \(3,\)") as caught:
        steps(env, 1)
    assert "toy/Fault-v0" in caught.value.what
    assert len(caught.value.parts) == 3
    env.close()


def test_nan_is_found_with_its_field_and_environment() -> None:
    obs = {"joints": torch.zeros(4, 3, 2), "camera": torch.zeros(4, 3, 5, dtype=torch.uint8)}
    reward = torch.zeros(3, 3)
    check_finite(obs, reward, "my/Env-v0")
    obs["joints"][2, 1, 0] = float("nan")
    with pytest.raises(UniRLError, match=r"nan in obs/joints of environment 1.*row 2") as caught:
        check_finite(obs, reward, "my/Env-v0")
    assert len(caught.value.parts) == 3
    obs["joints"][2, 1, 0] = 0.0
    reward[1, 2] = -float("inf")
    with pytest.raises(UniRLError, match=r"-inf in reward of environment 2"):
        check_finite(obs, reward, "my/Env-v0")


def test_large_but_finite_values_pass() -> None:
    check_finite(torch.full((2, 4, 3), 3e38), torch.zeros(1, 4), "my/Env-v0")


def test_a_nan_of_an_environment_reaches_the_check() -> None:
    env = make_vec(fault(nan_at=2), 2)
    rows = [env.reset(0)]
    rows += [env.step(np.zeros(2, dtype=np.int64)).obs for _ in range(3)]
    with pytest.raises(UniRLError, match="nan in obs of environment 0"):
        check_finite(torch.from_numpy(np.stack(rows)), torch.zeros(3, 2), "toy/Fault-v0")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"terminated": None}, r"None \(NoneType\) as terminated"),
        ({"truncated": "no"}, r"'no' \(str\) as truncated"),
        ({"reward": "much"}, r"'much' \(str\) as reward"),
        ({"reward": [1.0, 2.0, 3.0]}, r"\[1\.0, 2\.0, 3\.0\] \(list\) as reward"),
        ({"reward": None}, r"None \(NoneType\) as reward"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["sync", "vector"])
def test_a_value_that_is_none_is_named(kind: str, value: dict[str, Any], message: str) -> None:
    env = make_vec(toy_env("Returns", kind, kwargs={"value": value}), 2)
    env.reset(0)
    with pytest.raises(UniRLError, match=r'env "toy/Returns-v0" returned .*' + message) as caught:
        steps(env, 1)
    assert len(caught.value.parts) == 3


@pytest.mark.parametrize("like", [np.float32, np.float64, np.int64, int, np.array])
def test_what_is_like_a_number_is_one(like: Any) -> None:
    value = {"reward": like(1), "terminated": np.bool_(True)}
    env = make_vec(toy_env("Returns", "sync", kwargs={"value": value}), 2)
    env.reset(0)
    step = env.step(np.zeros(2, dtype=np.int64))
    assert step.reward.tolist() == [1.0, 1.0]
    assert step.terminated.all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", r'env "toy/Unmade-v0" failed while it was made: AssertionError .*no simulator'),
        ("exits", r'env "toy/Unmade-v0" called sys\.exit while it was made'),
        ("hangs", r'env "toy/Unmade-v0" was not made within 0\.3 s: it hung in .*toy_envs\.py'),
        ("hangs at reset", r'env "toy/Unmade-v0" was not reset within 0\.3 s'),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(how: str, message: str) -> None:
    config = toy_env("Unmade", "sync", kwargs={"how": how}, make_timeout=0.3)
    with pytest.raises(EnvCrashed, match=message) as caught:
        make_vec(config, 1).reset(0)
    assert len(caught.value.parts) == 3


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def workers(env: Any) -> list[int]:
    return [process.pid for process in env.engine.env.processes]


def test_a_stuck_environment_is_named_at_the_deadline_and_its_process_ends() -> None:
    config = EnvConfig(
        "toy/Fault-v0",
        "async",
        step_timeout=0.5,
        kwargs={"sleep_at": 2, "sleep_seconds": 60.0},
    )
    env = make_vec(config, 2)
    env.reset(0)
    steps(env, 1)
    started = time.monotonic()
    with pytest.raises(EnvCrashed, match=r"no answer from environment \[0, 1\]"):
        steps(env, 1)
    pids = workers(env)
    env.close()
    assert time.monotonic() - started < 30
    assert gone_within(pids, 30)


def test_a_killed_worker_is_reported_and_the_others_end() -> None:
    env = make_vec(EnvConfig("CartPole-v1", "async"), 3)
    env.reset(0)
    pids = workers(env)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EnvCrashed, match=r"1 \(exit code -9\)"):
        steps(env, 5)
    env.close()
    env.close()
    assert gone_within(pids, 30)


@pytest.mark.skipif(sys.platform != "linux", reason="the tie to the parent is Linux's prctl")
def test_workers_die_with_a_parent_that_is_killed_and_survive_ctrl_c() -> None:
    script = """
        import sys, time
        from unirl.envs.config import EnvConfig
        from unirl.envs.make import make_vec
        env = make_vec(EnvConfig("CartPole-v1", "async"), 2)
        env.reset(0)
        print(*[process.pid for process in env.engine.env.processes], flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
        assert all(alive(pid) for pid in pids), "Ctrl-C is the parent's to handle"
    finally:
        parent.kill()
        parent.wait()
    assert gone_within(pids, 30)
    parent.stdout.close()


def _try_async(answer: Any) -> None:
    try:
        make_vec(EnvConfig("CartPole-v1", "async"), 1)
    except UniRLError as error:
        answer.send(str(error))


def test_a_daemonic_process_cannot_have_workers_and_the_error_says_so() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_async, args=(sender,), daemon=True)
    process.start()
    try:
        assert receiver.poll(30)
        assert "this one is daemonic" in receiver.recv()
    finally:
        process.join(10)

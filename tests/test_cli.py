"""The command line: what it answers, what it refuses, and that no user sees a traceback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

import unirl
from tests import forked
from unirl import cli
from unirl.commands import run_folder
from unirl.config import load_toml
from unirl.envs.config import EngineName
from unirl.errors import UniRLError

ROOT = Path(cli.__file__).resolve().parent.parent
FAULT = ["--env.id", "toy/Fault-v0", "--env.import-module", "tests.toy_envs"]
SMALL = ["--env.id", "CartPole-v1", "--actor.num-envs", "8", "--run.total-steps", "2000"]
ONE_THREAD = ["--runner.learner-threads", "1", "--no-console"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run; tests read it and add reports to it."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["train", "impala", *SMALL, *ONE_THREAD, "--name", "a", "--runs-dir", str(folder)]
    assert cli.main([*words, "--run.eval-steps", "1000", "--run.eval-episodes", "3"]) == 0
    return folder / "a"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must be refused in three parts; returns what it said."""
    code = cli.main(words)
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err + captured.out
    lines = captured.err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("error: "), captured.err
    return captured.err


def run_python(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120
    )


# ---------------------------------------------------------------------------------------- answers


def test_answers_that_need_no_torch_do_not_wait_for_it() -> None:
    commands = [
        [],
        ["--help"],
        ["list", "recipes"],
        ["list", "configs"],
        ["bench"],
        ["bench", "scripts"],
        ["bench", "--help"],
        ["tune", "--help"],
    ]
    code = (
        "import sys; from unirl.cli import main\n"
        f"for words in {commands!r}:\n"
        "    assert main(words) == 0\n"
        "    assert not {'torch', 'gymnasium', 'numpy'} & set(sys.modules), words"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_training_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    not_used = [
        *("torch._dynamo", "torch._inductor", "sympy", "transformers", "datasets", "pandas"),
        *("tensorboard.summary", "tensorboard.compat.tensorflow_stub", "matplotlib", "scipy"),
        *("ale_py", "mujoco", "envpool", "pettingzoo"),
    ]
    words = ["train", "@cartpole", "--runs-dir", str(tmp_path), "--run.total-steps", "1"]
    code = (
        "import sys, unirl\n"
        "assert not {'torch', 'gymnasium', 'numpy'} & set(sys.modules)\n"
        "from unirl.cli import main\n"
        f"assert main({words!r}) == 0\n"
        f"assert not set({not_used!r}) & set(sys.modules), set({not_used!r}) & set(sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_python_m_unirl_is_the_command() -> None:
    done = run_python("-m", "unirl", "trian")
    assert done.returncode == 2
    assert 'did you mean "train"?' in done.stderr and "Traceback" not in done.stderr


def test_version_is_the_one_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import tomllib

    assert cli.main(["--version"]) == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"unirl {project['version']}\n"


@pytest.mark.parametrize("recipe", ["impala", "appo", "ondevice", "grpo"])
def test_help_of_a_recipe_is_short_and_explains_every_key_when_asked(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from unirl.config import fields_help, flag_of
    from unirl.registry import recipe as module_of

    def shown(*words: str) -> str:
        assert cli.main(["train", recipe, *words]) == 0
        text = capsys.readouterr().out
        assert max(len(line) for line in text.splitlines()) <= 80
        return text

    short, whole = shown("--help"), shown("--help", "--all")
    assert shown("--all") == whole
    items = fields_help(module_of(recipe).Config)
    num_missing = 0
    for item in items:
        assert item.doc, f"{item.key} has no docstring"
        assert f"  {flag_of(item.key)}  " in whole
        num_missing += f"  {flag_of(item.key)}  " not in short
    assert "  --run.total-steps  " in short and "  --learner.optimizer.lr  " in short
    assert short.count("\n") <= 110 < whole.count("\n")
    assert short.endswith(f"{num_missing} more keys: unirl train {recipe} --help --all\n")


@pytest.mark.parametrize("words", [["algorithms"], ["algorithms", "--all"]])
def test_every_algorithm_is_listed_in_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from unirl.llm.algorithms.presets import PRESETS

    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert set(PRESETS) <= {line.split()[0] for line in lines if line.strip()}
    assert len(lines) <= len(PRESETS) + 6 or "--all" in words


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: unirl {command} ")


def test_lists_can_be_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "envs", "cartpole-v1"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out.split()
    assert cli.main(["list", "recipes"]) == 0
    assert capsys.readouterr().out.startswith("impala")


def test_engines_are_listed_as_the_config_knows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "engines"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(get_args(EngineName))


def test_benchmark_suites_are_listed_one_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "atari",
        "mujoco",
        "classic",
        "isaac",
        "cluster",
        *["scripts"] * 3,
    ]
    assert all(len(line.split()) > 2 for line in lines)
    assert cli.main(["bench", "scripts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["queue", "cluster", "classic"]


ROBOTS = ("@warp-ant", "@warp-ant-v5", "@warp-halfcheetah", "@warp-humanoid")
"""Configs whose models Warp compiles for half a minute before it says what can be seen of them."""


def test_every_shipped_config_resolves_and_says_what_it_is_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["list", "configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list((ROOT / "configs").glob("*.toml")))
    assert cli.main(["list", "envs"]) == 0
    envs = capsys.readouterr().out.split()
    for line in lines:
        name, *text = line.split()
        assert text, f"{name} must begin with a comment on what it is for"
        # The folder of its model is made by `unirl model`.
        instead = ["--model", "tiny"] if name == "@digits" else []
        if name in ("@agent-products", "@agent-python", "@agent-search", "@agent-sim"):
            # A token a character: no word of the tools, and few of the answers, has room.
            small = ["--agent.max-episode-tokens", "100", "--sampling.max-tokens", "16"]
            instead = ["--model", "tiny", "--agent.calls", "brief", *small]
        if name in ROBOTS:
            own = load_toml(ROOT / "configs" / f"{name.removeprefix('@')}.toml")["env"]["id"]
            assert own in envs
            instead = ["--env.id", "warp/Cartpole"]
        assert cli.main(["train", name, "--dry-run", *instead]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ROBOTS)
def test_a_config_of_a_robot_resolves(name: str) -> None:
    assert cli.main(["train", name, "--dry-run"]) == 0


# ------------------------------------------------------------------------------------------ train


def test_a_dry_run_prints_config_and_plan_and_starts_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "impala", *SMALL, "--queue.window", "none", "--target=42", "--dry-run"]
    assert cli.main([*words, "--policy.compute-dtype", "auto"]) == 0
    shown = capsys.readouterr().out
    assert "# runner    inline" in shown
    assert not list(Path().iterdir())
    Path("again.toml").write_text(shown)
    assert 'compute_dtype = "auto"' not in shown
    # What was printed is a config file of the same run.
    assert cli.main(["train", "@again.toml", "--dry-run"]) == 0
    again = capsys.readouterr().out
    assert shown.startswith(again.rstrip()), "but for the defaults that it took"
    assert "# defaults  environment vectorised" in shown and "# defaults" not in again
    table = load_toml(Path("again.toml"))
    assert table["run"]["target_return"] == 42.0 and table["queue"]["window"] == "none"


def test_later_files_and_flags_win(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text('recipe = "impala"\n[run]\nseed = 2\ntotal_steps = 1e6\n')
    Path("b.toml").write_text("[run]\ntotal_steps = 5\nlog_seconds = 9\n")
    words = ["train", "@a.toml", "@./b.toml", "--run.log-seconds", "1", "--dry-run"]
    assert cli.main(words) == 0
    Path("all.toml").write_text(capsys.readouterr().out)
    run = load_toml(Path("all.toml"))["run"]
    assert (run["seed"], run["total_steps"], run["log_seconds"]) == (2, 5, 1.0)


def test_a_run_leaves_what_is_needed_to_repeat_it(trained: Path) -> None:
    command = (trained / "command.txt").read_text()
    assert command.startswith("unirl train impala --env.id CartPole-v1 ")
    table = load_toml(trained / "config.toml")
    assert "defaults  environment vectorised" in (trained / "log.txt").read_text()
    assert table["learner"]["epochs"] == 2, "what the kind chose is on record"
    resumed, _ = run_folder.load(trained)
    assert resumed.config.learner.epochs == 2 and not resumed.notes, "and is not chosen again"
    assert table["recipe"] == "impala" and table["run"]["total_steps"] == 2000
    assert (trained / "metrics.jsonl").stat().st_size > 0
    assert (trained / "checkpoints" / "latest" / "state.json").is_file()


def test_a_run_folder_that_exists_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "impala", *SMALL, *ONE_THREAD, "--runs-dir", str(trained.parent)]
    said = refused(capsys, *words, "--name", "a")
    assert "exists" in said and "unirl resume" in said and "--overwrite" in said


def test_overwrite_deletes_runs_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "impala", *SMALL, *ONE_THREAD, "--name", "x", "--overwrite"]
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/thesis.txt").write_text("dear")
    assert "not a run folder" in refused(capsys, *words)
    assert Path("runs/x/thesis.txt").read_text() == "dear"
    Path("runs/x/thesis.txt").rename("runs/x/config.toml")
    assert cli.main(words) == 0
    assert load_toml(Path("runs/x/config.toml"))["recipe"] == "impala"


def test_after_a_failed_start_the_corrected_command_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "impala", *SMALL, *ONE_THREAD, "--name", "x"]
    broken = [
        "--env.id",
        "toy/Fault-v0",
        "--env.import-module",
        "tests.toy_envs",
        "--env.kwargs",
        '{"raise_at": 3}',
    ]
    said = refused(capsys, *words, *broken)
    assert "actor 0 died" in said and Path("runs/x/log.txt").is_file()
    assert cli.main(words) == 0


def test_a_failed_run_that_learned_something_is_not_deleted_without_being_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "impala", *SMALL, *ONE_THREAD, "--name", "x", "--run.log-seconds", "0"]
    broken = [
        "--env.id",
        "toy/Fault-v0",
        "--env.import-module",
        "tests.toy_envs",
        "--env.kwargs",
        '{"raise_at": 90}',
    ]
    refused(capsys, *words, *broken, "--runner.max-restarts", "0")
    shutil.rmtree("runs/x/checkpoints", ignore_errors=True)  # as if the first had not been due
    rows = Path("runs/x/metrics.jsonl").read_text()
    assert rows
    assert "exists" in refused(capsys, *words)
    assert Path("runs/x/metrics.jsonl").read_text() == rows


def test_a_path_where_no_run_folder_can_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    said = refused(capsys, "train", "impala", *SMALL, "--runs-dir", "file")
    assert "cannot be written" in said and "--runs-dir" in said


def test_an_unexpected_error_is_one_message_and_a_trace_in_the_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_recipe.py").write_text(
        '"""A recipe with a bug."""\n'
        "from unirl.recipes.impala import Config\n"
        "def plan(config):\n    raise ZeroDivisionError('oh')\n"
    )
    (tmp_path / "pkg").mkdir()
    (tmp_path / "my_recipe.py").rename(tmp_path / "pkg" / "my_recipe.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = cli.main(["train", "pkg.my_recipe"])
    said = capsys.readouterr().err
    assert code == 1 and "unexpected ZeroDivisionError: oh" in said and "Traceback" not in said
    log = Path(said.splitlines()[1].rpartition(" ")[2])
    assert "raise ZeroDivisionError" in log.read_text()
    log.unlink()


@pytest.mark.parametrize(("runner", "sessions"), [("inline", 1), ("processes", 2)])
def test_ctrl_c_finishes_the_update_and_prints_how_to_continue(
    tmp_path: Path, runner: str, sessions: int
) -> None:
    from unirl.storage.checkpoint import load_checkpoint

    flags = [*SMALL[:-1], "1e9", *ONE_THREAD, "--runner.kind", runner, "--run.log-seconds", "0.2"]
    words, step = ["train", "impala", *flags, "--name", "x"], 0
    for num_sessions in range(1, sessions + 1):
        out = train_until_ctrl_c(words, tmp_path / "runs/x/metrics.jsonl")
        assert "interrupted" in out
        resume = next(line for line in out.splitlines() if "unirl resume" in line)
        words = [*shlex.split(resume.partition("unirl ")[2]), "--no-console"]
        checkpoint = load_checkpoint(tmp_path / "runs/x")
        assert checkpoint.step > step, "each session continues where the last one ended"
        step = checkpoint.step
        started = (tmp_path / "runs/x/command.txt").read_text().splitlines()
        assert len(started) == num_sessions
        assert num_sessions == 1 or started[1] == "unirl resume runs/x --no-console"


def train_until_ctrl_c(words: list[str], metrics: Path) -> str:
    """Press Ctrl-C once this session has written metrics; returns what it printed in the end."""
    size = metrics.stat().st_size if metrics.is_file() else 0
    out, err = (Path(f"{name}-{size}.txt").absolute() for name in ("out", "err"))
    process = forked.start(cli.main, words, output=out, errors=err)
    try:
        deadline = time.monotonic() + 90
        while not (metrics.is_file() and metrics.stat().st_size > size):
            assert process.is_alive() and time.monotonic() < deadline, err.read_text()
            time.sleep(0.05)
        # A terminal interrupts everyone: the learner and its actors.
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 0, err.read_text()
    assert err.read_text() == ""
    return out.read_text()


# ------------------------------------------------------------------------------- after training


def test_eval_reports_and_keeps_the_result(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(trained), "--episodes", "5", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    kept = json.loads(Path(first["file"]).read_text())
    assert kept["returns"] and len(kept["returns"]) == first["num_episodes"] == 5
    assert first["return_min"] <= first["return_mean"] <= first["return_max"]
    assert cli.main(["eval", str(trained / "checkpoints" / "latest"), "--episodes=5"]) == 0
    assert f"return {first['return_mean']:.2f} +- " in capsys.readouterr().out


def test_an_evaluation_by_hand_replaces_neither_trainings_own_nor_another_one(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {path: path.read_bytes() for path in (trained / "eval").glob("*.json")}
    assert len(own) == 2 and all(b'"num_episodes": 3' in text for text in own.values())
    kept = {}
    for words in (
        ["--episodes", "1"],
        ["--episodes", "2"],
        ["--episodes", "1", "--seed", "77"],
        ["--episodes", "1", "--deterministic"],
        ["--episodes", "1", "--env.max-episode-steps", "7"],
        ["--episodes", "1", "--env.max-episode-steps", "8"],
        ["--episodes", "1"],  # the first one again
    ):
        assert cli.main(["eval", str(trained), *words, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        kept[shown["file"]] = json.loads(Path(shown["file"]).read_text())
        assert kept[shown["file"]]["seed"] == shown["seed"]
    assert len(kept) == 6 and {Path(path).parent for path in kept} == {trained / "eval" / "by_hand"}
    assert sorted({result["seed"] for result in kept.values()}) == [1, 77]
    assert own == {path: path.read_bytes() for path in (trained / "eval").glob("*.json")}


def test_flags_of_the_recipe_change_what_is_evaluated(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(trained), "--episodes", "3", "--json", "--env.max-episode-steps", "7"]
    assert cli.main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    kept = json.loads(Path(shown["file"]).read_text())
    assert max(kept["lengths"]) == 7 and kept["changes"] == {"env.max_episode_steps": "7"}
    assert "repeat" in refused(capsys, "eval", str(trained), "--env.repeat-action-probabilit", "0")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--episodes", "0"], "--episodes is 0"),
        (["--seed", "-4"], "--seed is -4"),
        (["b"], '"b" is one argument too many'),
        (["--epsiodes", "3"], "--episodes"),
        (["--env.random-burst-probability", "0.1"], "--env.random-burst-probability has no effect"),
        (["--env.episodic-life"], "--env.episodic-life has no effect"),
        (["--learner.gamma", "0.5"], "--learner.gamma has no effect"),
        (["--run.seed", "7"], "use --seed"),
        (["--run.eval-episodes", "7"], "use --episodes"),
    ],
)
def test_bad_flags_of_an_evaluation_are_refused(
    words: list[str], part: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused(capsys, "eval", str(trained), *words)


def test_greedy_evaluation_is_another_one(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, greedy in (("--deterministic", True), ("--stochastic", False)):
        assert cli.main(["eval", str(trained), "--episodes", "3", "--json", flag]) == 0
        assert json.loads(capsys.readouterr().out)["deterministic"] is greedy
    assert "both" in refused(capsys, "eval", str(trained), "--deterministic", "--stochastic")


def test_resume_continues_where_the_run_was(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(trained, "runs/b", symlinks=True)
    assert cli.main(["resume", "b", "--run.total-steps", "4e3", "--no-console"]) == 0
    assert load_toml(Path("runs/b/config.toml"))["run"]["total_steps"] == 4000
    rows = [json.loads(line) for line in Path("runs/b/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] >= 4000
    assert Path("runs/b/command.txt").read_text().count("\n") == 2


def test_one_checkpoint_of_a_run_stands_for_the_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from unirl.storage.checkpoint import list_checkpoints

    shutil.copytree(trained, "runs/b", symlinks=True)
    more = ["--run.total-steps", "4e3", "--no-console"]
    assert cli.main(["resume", "b", *more, "--run.checkpoint-steps", "500"]) == 0
    one = str(list_checkpoints(Path("runs/b"))[-2])
    newest = Path("runs/b/checkpoints/latest").resolve()
    assert cli.main(["plot", one]) == 0 and Path("runs/b/plot.png").is_file()
    assert cli.main(["card", one]) == 0 and Path("runs/b/README.md").is_file()
    # Training continues from that very one: the newer one is made a second time.
    before = (newest / "state.json").stat().st_ino
    assert cli.main(["resume", one, *more]) == 0
    assert Path("runs/b/checkpoints/latest").resolve() == newest
    assert (newest / "state.json").stat().st_ino != before


def test_a_run_that_is_done_is_not_resumed_without_more_steps(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(trained.iterdir())}
    said = refused(capsys, "resume", str(trained), "--no-console")
    assert "done already" in said and "of 2000 steps" in said and "--run.total-steps" in said
    more = ["--run.total-steps", "9000", "--run.max-seconds", "0.01"]
    assert "has used its time" in refused(capsys, "resume", str(trained), *more)
    assert before == {path: path.stat().st_mtime_ns for path in sorted(trained.iterdir())}


def test_a_resume_that_is_refused_leaves_the_config_as_it_was(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "config.toml").read_text()
    # It fits the fingerprint, and then not the optimiser's saved state.
    flags = ["--learner.optimizer.name", "rmsprop", "--run.total-steps", "4e3", "--no-console"]
    assert "optimizer" in refused(capsys, "resume", str(trained), *flags)
    assert (trained / "config.toml").read_text() == before


def test_a_new_run_does_not_touch_the_folder_of_another(trained: Path) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    plan = unirl.make_plan("impala", **{"env.id": "Acrobot-v1"})
    with pytest.raises(UniRLError, match="holds a run already"):
        unirl.run(plan, trained, console=False)
    with pytest.raises(UniRLError, match="another env"):
        unirl.run(plan, trained, resume=trained, console=False)
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


def test_the_commands_on_the_card_are_understood(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    assert cli.main(["card", str(trained)]) == 0
    capsys.readouterr()
    card = (trained / "README.md").read_text().partition("## Use")[2].partition("## Config")[0]
    lines = [line for line in card.splitlines() if line.startswith("unirl ")]
    commands = {
        words[1]: words[1:] for words in (shlex.split(line, comments=True) for line in lines)
    }
    assert list(commands) == ["resume", "eval", "play"]
    assert "done already" in refused(capsys, *commands["resume"])
    assert cli.main([*commands["eval"], "--episodes", "2"]) == 0
    assert cli.main(commands["play"]) == 0
    assert list((trained / "videos").glob("*.mp4"))


def test_play_writes_a_video(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("PIL")
    assert cli.main(["play", str(trained), "--video", "film.gif"]) == 0
    assert Path("film.gif").read_bytes()[:4] == b"GIF8"


def test_play_of_what_has_no_pictures_says_so_and_lets_go_of_it(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    Path("pkg").mkdir()
    Path("pkg/no_pictures.py").write_text(
        '"""impala, judged by returns alone."""\n'
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from unirl.recipes import impala\n"
        "from unirl.recipes.impala import Config\n"
        "class Returns:\n"
        "    def __init__(self, seed): pass\n"
        "    def evaluate(self, weights, num_episodes, *, deterministic=False): pass\n"
        "    def close(self): Path('closed').touch()\n"
        "def plan(config):\n"
        "    plan = impala.plan(config).with_learner(make_evaluator=Returns)\n"
        "    return replace(plan, recipe='returns')\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    shutil.copytree(trained, "runs/b", symlinks=True)
    config = Path("runs/b/config.toml")
    config.write_text(config.read_text().replace('"impala"', '"pkg.no_pictures"', 1))
    said = refused(capsys, "play", "runs/b")
    assert "no pictures" in said and "unirl eval runs/b" in said and "make_evaluator" not in said
    assert Path("closed").is_file()


def test_plot_and_card_write_their_files(trained: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plot", str(trained), "-o", "curve.png"]) == 0
    assert Path("curve.png").read_bytes()[1:4] == b"PNG"
    assert cli.main(["card", str(trained)]) == 0
    assert "CartPole-v1" in (trained / "README.md").read_text()


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ['"trian"', '"train"']),
        (["train"], ["no recipe"]),
        (["train", "impla"], ['recipe "impla" is unknown', '"impala"']),
        (["train", "no_such.recipe"], ["no_such"]),
        (
            ["train", "impala", "--env.id", "CartPole-v9", "--dry-run"],
            ["CartPole-v9", "CartPole-v1"],
        ),
        (["train", "impala", "--env.id", "ALE/Pnog-v5"], ["ALE/Pnog-v5", "unirl list envs"]),
        (["train", "impala", "--queue.max-stalness", "1"], ["--queue.max-staleness"]),
        (["train", "impala", "--total-steps", "1"], ["--run.total-steps"]),
        (["train", "impala", "--nmae", "x"], ["--nmae", "--name"]),
        (["train", "impala", "--name", "../../x"], ['"../../x"', 'without ".."', "--runs-dir"]),
        (["train", "impala", "--name", "/tmp/x"], ['"/tmp/x"', "not absolute"]),
        (["train", "impala", "--name", ""], ['the run is ""', "not empty"]),
        (["train", "impala", "--run.log-seconds", "nan"], ["--run.log-seconds", "found nan"]),
        (["train", "impala", "--run.log-seconds", "inf"], ["run.log_seconds is inf", "2.0"]),
        (["train", "impala", "--target", "inf"], ["target is inf", "finite"]),
        (["train", "impala", "--mix.A", "inf"], ["mix.A is inf", "finite"]),
        (["bench", "@cartpole", "--seconds", "inf"], ["seconds is inf", "finite"]),
        (["train", "impala", "-n", "x"], ["flag -n is unknown"]),
        (["train", "impala", "--frobnicate"], ["--frobnicate", "--help"]),
        (["train", "impala", "--run.total-steps"], ["has no value"]),
        (["train", "impala", "--run.total-steps", "many"], ["an integer", '"many"']),
        (["train", "impala", "--run.total-steps", "1.5"], ["an integer", '"1.5"']),
        (["train", "impala", "--run.total-steps", "-5"], ["run.total_steps is -5"]),
        (["train", "impala", "--queue.max-staleness", "-1"], ["queue.max_staleness is -1"]),
        (["train", "impala", "--runner.kind", "inlin"], ['"inline"']),
        (["train", "impala", "pong.toml"], ["@pong.toml"]),
        (["train", "@no-such-config"], ["no-such-config", "unirl list configs"]),
        (["train", "@no/such.toml"], ["no/such.toml"]),
        (["resume", "nothing"], ['run "nothing" does not exist']),
        (["resume"], ["no run"]),
        (["eval", "nothing"], ["does not exist"]),
        (["play", "nothing"], ["does not exist"]),
        (["plot"], ["no run"]),
        (["card", "nothing"], ["does not exist"]),
        (["list", "env"], ["envs"]),
        (
            ["bench", "clasic"],
            ['"clasic"', "atari, mujoco, classic, isaac", 'did you mean "classic"?'],
        ),
        (["train", "ppo", "--n-steps", "5"], ["did you mean --actor.unroll-length?"]),
        (["train", "ppo", "--learner.ent-coef", "5"], ["did you mean --learner.entropy-coef?"]),
        (["bench", "all"], ["atari, mujoco, classic, isaac, cluster, scripts,", "unirl bench"]),
        (["bench", "queue"], ['"queue"', "unirl bench scripts queue"]),
        (["bench", "pong"], ['"pong"', "unirl bench @pong"]),
        (["bench", "scripts", "quue"], ['"quue"', "queue, cluster", 'did you mean "queue"?']),
        (["bench", "@cartpole", "--seconds", "0"], ["--seconds is 0", "--seconds > 0"]),
        (["bench", "@cartpole", "--second", "3"], ["--second", "--seconds"]),
        (["bench", "@cartpole", "appo"], ["another recipe", 'recipe = "impala"', "leave appo out"]),
        (["bench", "--json"], ["no recipe was given", "unirl bench @pong"]),
        (["train", "grpo", "--model.lora-alpha", "64"], ["lora_alpha is 64.0 and has no effect"]),
        (["algorithms", "diff", "verl:grpo"], ["try unirl algorithms diff verl:grpo trl:grpo"]),
        (["algorithms", "dif", "a", "b"], ['did you mean "diff"?']),
        (["bench", "classic", "--env.id", "CratPole-v1"], ["CratPole-v1", "CartPole-v1"]),
        (["tune"], ["no recipe was given", "unirl tune @pong"]),
        (
            ["tune", "@cartpole", "--out", "no/such.toml"],
            ['"no/such.toml"', "a folder that exists"],
        ),
        (["tune", "@cartpole", "--out", "tuned"], ['"tuned"', "--out tuned.toml"]),
        (
            ["train", "grpo", "--algorithm.objective", "reinforce", "--learner.epochs", "2"],
            ["objective is reinforce", "it is 2"],
        ),
        (["tune", "@cartpole", "--learner.minibatches", "7"], ["7 minibatches"]),
    ],
)
def test_bad_input_is_refused_in_three_parts(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *words)
    assert all(part in said for part in parts), said
    assert not list(Path().iterdir()), "what is refused leaves nothing behind"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('recipe = "impala"\n[queue]\nmax_stalness = 1\n', ["queue.max_staleness", "bad.toml"]),
        ('recipe = "impala"\nseed = 1\n', ["run.seed", "bad.toml"]),
        ('recipe = "impala"\n[run]\nseed = "1"\n', ["run.seed", "an integer", "a string"]),
        ('recipe = "impala"\nrun = 1\n', ["run", "a table"]),
        ('recipe = "impla"\n', ['"impala"']),
        ("[run]\nseed = 1\n", ["no recipe"]),
        ("recipe = impala\n", ["not TOML", "bad.toml"]),
    ],
)
def test_a_bad_config_file_is_refused_in_three_parts(
    text: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text(text)
    said = refused(capsys, "train", "@bad.toml", "--dry-run")
    assert all(part in said for part in parts), said


def test_a_config_file_of_another_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.toml").write_text('recipe = "ppo"\n')
    said = refused(capsys, "train", "impala", "@other.toml")
    assert '"ppo"' in said and '"impala"' in said


class Missing:
    """Finds no Atari."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "ale_py":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_atari() -> int:
    assert "ale_py" not in sys.modules
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    return cli.main(["train", "impala", "--env.id", "ALE/Pong-v5"])


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    process = forked.start(without_atari, output=tmp_path / "said.txt")
    process.join(120)
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 2 and "Traceback" not in said, said
    assert "pip install 'unirl[atari]'" in said
    assert len([line for line in said.splitlines() if line.strip()]) == 3


def test_a_changed_environment_is_refused_on_resume(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = (trained / "command.txt").read_text()
    said = refused(capsys, "resume", str(trained), "--env.id", "Acrobot-v1", "--no-console")
    assert "CartPole-v1" in said and "Acrobot-v1" in said
    assert (trained / "command.txt").read_text() == commands, "it records what started"
    assert load_toml(trained / "config.toml")["env"]["id"] == "CartPole-v1"


def test_an_evaluation_that_cannot_be_written_has_been_printed(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, "runs/no-eval", symlinks=True)
    shutil.rmtree("runs/no-eval/eval")
    Path("runs/no-eval/eval").write_text("in the way")
    assert cli.main(["eval", "no-eval", "--episodes", "2"]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("return ") and "over 2 episodes" in captured.out
    assert (
        "eval/by_hand cannot be read or written" in captured.err and "Traceback" not in captured.err
    )


def test_a_changed_policy_is_refused_on_resume_by_what_differs(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "resume", str(trained), "--policy.hidden", "32", "--no-console")
    assert "it has policy.hidden = [" in said and "this run has [32]" in said


def test_a_plot_is_a_png(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plot", str(trained), "-o", "curve.pdf")
    assert '"curve.pdf" is no PNG' in said and "try --out curve.png" in said


def test_a_folder_that_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    assert '"photos" is not a run folder' in refused(capsys, "eval", "photos")


def test_a_run_without_a_checkpoint_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/c").mkdir(parents=True)
    Path("runs/c/config.toml").write_bytes((trained / "config.toml").read_bytes())
    assert "no checkpoint" in refused(capsys, "eval", "c")
    assert "no checkpoint" in refused(capsys, "resume", "c", "--no-console")
    assert [path.name for path in Path("runs/c").iterdir()] == ["config.toml"]


def test_a_video_of_an_unknown_kind_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "film.avi" in refused(capsys, "play", str(trained), "--video", "film.avi")

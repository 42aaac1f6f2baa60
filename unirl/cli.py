"""The `unirl` command: train, resume, eval, play, plot, list, card, bench; source: none.

Nothing heavy is imported until a command needs it: `unirl --help` and `unirl list` answer at once.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.core.errors import UniRLError

if TYPE_CHECKING:
    from unirl.core.checkpoint import Checkpoint
    from unirl.runners.plan import Plan

EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130

ENGINES = {
    "auto": "ale for ALE/*, else the environment's own vector class where it has one, else sync",
    "vector": "the environment's own vector class; the fastest where it exists",
    "sync": "Gymnasium, one environment after the other in the actor's process",
    "async": "Gymnasium, one process per environment; for steps far slower than 100 microseconds",
    "envpool": "EnvPool's C++ threads; has ids of its own",
    "ale": "ale-py's C++ threads; ALE/* only",
}
"""Values of env.engine, as `unirl list engines` shows them."""

SUITES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "queue": (("*queue*.py",),),
    "classic": (("throughput.py", "pong"), ("throughput.py", "cartpole")),
}
"""Suites of `unirl bench`: files of benchmarks/ with their arguments."""


_FAILED = "failed.txt"


class _Crash(Exception):
    """An unexpected error whose trace lies in `log` already; the cause is chained."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.log = log


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class TrainOptions:
    """Flags of `unirl train` besides the recipe's own."""

    name: str | None = None
    """Name of the run folder. None: the config file's name, or recipe, environment and time."""
    runs_dir: Path = Path("runs")
    """Where run folders lie."""
    overwrite: bool = False
    """Delete a run folder of this name first."""
    dry_run: bool = False
    """Print the resolved config and the plan, and start nothing."""
    target: float | None = None
    """Stop at this mean return of recent episodes; short for --run.target-return."""
    console: bool = True
    """Show progress. --no-console: print nothing until the end."""


@dataclass(frozen=True)
class ResumeOptions:
    """Flags of `unirl resume` besides the recipe's own."""

    console: bool = True
    """Show progress. --no-console: print nothing until the end."""


@dataclass(frozen=True)
class EvalOptions:
    """Flags of `unirl eval`."""

    episodes: int = 100
    """Episodes to play. More: a smaller error of the mean, more time."""
    deterministic: bool = False
    """Take the most probable action. Neither this nor --stochastic: as run.eval_deterministic."""
    stochastic: bool = False
    """Sample actions as in training."""
    seed: int = 1
    """Of environments and sampled actions. The same seed plays the same episodes."""
    json: bool = False
    """Print one JSON object instead of a line."""

    def __post_init__(self) -> None:
        _check_episodes(self.episodes, self.deterministic and self.stochastic)


@dataclass(frozen=True)
class PlayOptions:
    """Flags of `unirl play`."""

    video: Path | None = None
    """File to write, .mp4 or .gif. None: videos/step_N.mp4 in the run folder."""
    episodes: int = 1
    """Episodes in the video."""
    deterministic: bool = False
    """Take the most probable action. Neither this nor --stochastic: as run.eval_deterministic."""
    stochastic: bool = False
    """Sample actions as in training."""
    seed: int = 1
    """Of environments and sampled actions."""

    def __post_init__(self) -> None:
        _check_episodes(self.episodes, self.deterministic and self.stochastic)


@dataclass(frozen=True)
class PlotOptions:
    """Flags of `unirl plot`."""

    out: Path | None = None
    """PNG to write (also -o). None: plot.png in the run folder, in the current one for several."""


@dataclass(frozen=True)
class NoOptions:
    """A command without flags."""


def _check_episodes(episodes: int, contradiction: bool) -> None:
    if episodes < 1:
        raise UniRLError(
            f"--episodes is {episodes}", "--episodes >= 1 must hold", "20 or 100 are usual"
        )
    if contradiction:
        raise UniRLError(
            "--deterministic and --stochastic were both given",
            "actions are either the most probable ones or sampled",
            "give one of them, or none: run.eval_deterministic decides",
        )


# ------------------------------------------------------------------------------------------- train


def train(arguments: Sequence[str]) -> int:
    """`unirl train`: recipe, then config files in order, then flags; what comes later wins."""
    name, files = _recipe_and_files(arguments)
    tables = {path: configs.load_toml(path) for path in files}
    named = {path: str(table.pop("recipe")) for path, table in tables.items() if "recipe" in table}
    run_name = [str(table.pop("name")) for table in tables.values() if "name" in table]
    for path, other in named.items():
        if name is not None and other != name:
            raise UniRLError(
                f'"{path}" is for another recipe',
                f'it says recipe = "{other}", the recipe asked for is "{name}"',
                f"leave {name} out, or take another config file",
            )
        name = other
    if name is None:
        raise UniRLError(
            "no recipe was given",
            "it is the first argument, or the key recipe of a config file",
            "try unirl train impala, and see unirl list recipes",
        )
    module = registry.recipe(name)
    cls: type = module.Config
    for path, table in tables.items():
        configs.check_keys(cls, table, f"in {path}")
    positional, flags = configs.parse_flags(arguments, TrainOptions, cls)
    surplus = [word for word in positional if word != name and not word.startswith("@")]
    if surplus:
        raise UniRLError(
            f'"{surplus[0]}" is one argument too many',
            "train takes one recipe, @files and --key value",
            f"{surplus[0]} as a config file is @{surplus[0]}"
            if surplus[0].endswith(".toml")
            else "see unirl train --help",
        )
    own, changes = _split(flags, TrainOptions)
    options = configs.from_mapping(TrainOptions, own)
    if options.target is not None:
        changes["run.target_return"] = options.target
    config: Any = configs.from_mapping(
        cls, configs.merge(*tables.values(), configs.nest(cls, changes))
    )
    plan: Plan = module.plan(config)
    if options.dry_run:
        print(configs.to_toml(config, recipe=name))
        print(textwrap.indent(plan.describe(), "# "))
        return 0
    folder = options.name or (run_name[-1] if run_name else _default_name(name, config))
    run_dir = options.runs_dir / folder
    _claim_folder(run_dir, options)
    return _start(plan, run_dir, ["train", *arguments], options.console)


def resume(arguments: Sequence[str]) -> int:
    """`unirl resume`: go on from a run's newest checkpoint, with changed keys if wanted."""
    run_dir = _find_run(_first(arguments, "resume"))
    module, table = _run_config(run_dir)
    cls: type = module.Config
    positional, flags = configs.parse_flags(arguments, ResumeOptions, cls)
    _one_run(positional, "resume")
    own, changes = _split(flags, ResumeOptions)
    options = configs.from_mapping(ResumeOptions, own)
    config: Any = configs.from_mapping(cls, configs.merge(table, configs.nest(cls, changes)))
    plan: Plan = module.plan(config)
    return _start(plan, run_dir, ["resume", *arguments], options.console, resume_from=run_dir)


def _start(
    plan: Plan,
    run_dir: Path,
    command: Sequence[str],
    console: bool,
    resume_from: Path | None = None,
) -> int:
    import unirl

    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "command.txt").open("a") as file:
        file.write(shlex.join(["unirl", *command]) + "\n")
    try:
        result = unirl.run(plan, run_dir, resume=resume_from, console=console)
    except UniRLError as error:
        _mark_failed(run_dir, error)
        raise
    except Exception as error:
        _mark_failed(run_dir, error)
        with (run_dir / "log.txt").open("a") as file:
            traceback.print_exception(error, file=file)
        raise _Crash(run_dir / "log.txt") from error
    rate = result.num_steps / result.seconds if result.seconds else 0.0
    print(
        f"{run_dir}: {result.reason} after {result.num_steps:,} steps in {result.seconds:.1f} s"
        f" ({rate:,.0f} steps/s, {result.version:,} updates)"
    )
    if result.reason == "interrupted":
        print(f"go on with:  unirl resume {shlex.quote(str(run_dir))}")
    else:
        print(f"next:  unirl eval {shlex.quote(str(run_dir))}  (or play, plot, card)")
    return 0


def _mark_failed(run_dir: Path, error: Exception) -> None:
    """A run that failed before its first checkpoint holds nothing worth keeping but its log."""
    if not (run_dir / "checkpoints" / "latest").exists():
        (run_dir / _FAILED).write_text(f"{type(error).__name__}: {error}\n")


def _recipe_and_files(arguments: Sequence[str]) -> tuple[str | None, list[Path]]:
    """The recipe's name and the @files, before the recipe's own flags can be understood."""
    help_by_key = {configs.flag_of(item.key): item for item in configs.fields_help(TrainOptions)}
    name: str | None = None
    files: list[Path] = []
    previous = ""
    for word in arguments:
        if word.startswith("@"):
            files.append(_config_file(word[1:]))
        elif not word.startswith("-") and name is None:
            flag = help_by_key.get(previous.replace("--no-", "--"))
            takes_value = previous.startswith("--") and "=" not in previous
            if not takes_value or (flag is not None and flag.is_switch):
                name = word
        previous = word
    return name, files


def _config_file(name: str) -> Path:
    if "/" in name or name.endswith(".toml"):
        return Path(name)
    path = _shipped_configs().get(name)
    if path is None:
        known = _shipped_configs()
        raise UniRLError(
            f'config "{name}" is not among the shipped ones',
            f"there are {', '.join(known) or 'none'}; your own need their suffix: @{name}.toml",
            configs.suggestion(name, known) or "see them all: unirl list configs",
        )
    return path


def _shipped_configs() -> dict[str, Path]:
    folder = Path(__file__).parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _default_name(recipe: str, config: Any) -> str:
    env_id = str(getattr(getattr(config, "env", None), "id", "")).lower()
    words = "".join(letter if letter.isalnum() else "-" for letter in env_id).strip("-")
    stem = recipe.rpartition(".")[2]
    return "-".join(part for part in (stem, words, time.strftime("%Y%m%d-%H%M%S")) if part)


def _claim_folder(run_dir: Path, options: TrainOptions) -> None:
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return
    # After a failed start one mends the command and calls it again: that must not need a flag.
    if not options.overwrite and not (run_dir / _FAILED).is_file():
        raise UniRLError(
            f'run folder "{run_dir}" exists',
            "a new run needs a folder of its own",
            f"unirl resume {run_dir}, or another --name, or --overwrite to delete it",
        )
    if not ((run_dir / "config.toml").is_file() or (run_dir / "command.txt").is_file()):
        raise UniRLError(
            f'"{run_dir}" is not a run folder, so --overwrite does not delete it',
            "a run folder has a config.toml or a command.txt",
            "choose another --name, or delete it yourself",
        )
    shutil.rmtree(run_dir)


def _split(flags: Mapping[str, Any], options: type) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {item.key for item in configs.fields_help(options)}
    return (
        {key: value for key, value in flags.items() if key in own},
        {key: value for key, value in flags.items() if key not in own},
    )


# -------------------------------------------------------------------------------- what was trained


def evaluate(arguments: Sequence[str]) -> int:
    """`unirl eval`: whole episodes with the newest checkpoint."""
    positional, options = _parse(arguments, EvalOptions)
    where = _find_run(_one_run(positional, "eval"))
    plan, checkpoint = _load(where)
    if plan.make_evaluator is None:
        raise _no_evaluation(plan, "evaluated")
    from unirl.core.tree import flatten
    from unirl.runners.hooks import write_evaluation

    deterministic = _deterministic(options, plan)
    evaluator = plan.make_evaluator(options.seed)
    try:
        result = evaluator.evaluate(
            flatten(checkpoint.model), options.episodes, deterministic=deterministic
        )
    finally:
        evaluator.close()
    path = write_evaluation(_run_dir(where), checkpoint.step, result, deterministic)
    numbers: dict[str, Any] = {
        "step": checkpoint.step,
        "num_episodes": len(result.returns),
        "deterministic": deterministic,
        "seed": options.seed,
        "return_mean": result.mean,
        "return_std": result.std,
        "return_min": min(result.returns),
        "return_max": max(result.returns),
        "length_mean": sum(result.lengths) / len(result.lengths),
    }
    if options.json:
        print(json.dumps({**numbers, "file": str(path)}))
        return 0
    print(
        f"return {result.mean:.2f} +- {result.std:.2f} (min {numbers['return_min']:.2f},"
        f" max {numbers['return_max']:.2f}) over {len(result.returns)} episodes of"
        f" {numbers['length_mean']:.0f} steps, actions {'greedy' if deterministic else 'sampled'},"
        f" checkpoint of step {checkpoint.step:,}"
    )
    print(f"wrote {path}")
    return 0


def play(arguments: Sequence[str]) -> int:
    """`unirl play`: a video of the newest checkpoint."""
    positional, options = _parse(arguments, PlayOptions)
    where = _find_run(_one_run(positional, "play"))
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        # Without a display, these draw into memory; what the user set counts.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")
    plan, checkpoint = _load(where)
    from unirl.core.evaluator import Player
    from unirl.core.tree import flatten
    from unirl.report.video import write_video

    player = plan.make_evaluator(options.seed) if plan.make_evaluator is not None else None
    if not isinstance(player, Player):
        raise _no_evaluation(plan, "shown as a video")
    path = options.video or _run_dir(where) / "videos" / f"step_{checkpoint.step:08d}.mp4"
    try:
        frames = player.frames(
            flatten(checkpoint.model),
            deterministic=_deterministic(options, plan),
            num_episodes=options.episodes,
        )
        first = next(frames)  # the environment says its speed once it stands
        write_video(itertools.chain([first], frames), path, player.frames_per_second)
    finally:
        player.close()
    print(f"wrote {path}")
    return 0


def plot(arguments: Sequence[str]) -> int:
    """`unirl plot`: return against steps and seconds, as a PNG."""
    positional, options = _parse(arguments, PlotOptions, short={"-o": "out"})
    if not positional:
        raise _missing_run("plot")
    runs = [_find_run(word) for word in positional]
    from unirl.report.plots import plot_runs

    out = options.out or (runs[0] / "plot.png" if len(runs) == 1 else Path("plot.png"))
    plot_runs(runs, out)
    print(f"wrote {out}")
    return 0


def card(arguments: Sequence[str]) -> int:
    """`unirl card`: a README.md for a run."""
    positional, _ = _parse(arguments, NoOptions)
    run_dir = _find_run(_one_run(positional, "card"))
    from unirl.report.card import write_card

    print(f"wrote {write_card(run_dir)}")
    return 0


def _load(where: Path) -> tuple[Plan, Checkpoint]:
    from unirl.core.checkpoint import load_checkpoint

    module, table = _run_config(_run_dir(where))
    plan: Plan = module.plan(configs.from_mapping(module.Config, table))
    return plan, load_checkpoint(where)


def _run_config(run_dir: Path) -> tuple[ModuleType, dict[str, Any]]:
    table = configs.load_toml(run_dir / "config.toml")
    name = table.pop("recipe", None)
    if not isinstance(name, str):
        raise UniRLError(
            f'"{run_dir / "config.toml"}" does not name its recipe',
            'a run\'s config.toml begins with recipe = "..."',
            "add the line with the recipe it was trained with",
        )
    table.pop("name", None)
    module = registry.recipe(name)
    configs.check_keys(module.Config, table, f"in {run_dir / 'config.toml'}")
    return module, table


def _find_run(word: str) -> Path:
    """A run folder by its path or by its name under runs/; also one checkpoint of a run."""
    for path in (Path(word), Path("runs") / word):
        if (_run_dir(path) / "config.toml").is_file():
            return path
    for path in (Path(word), Path("runs") / word):
        if path.is_dir():
            raise UniRLError(
                f'"{path}" is not a run folder',
                f"a run folder has a config.toml; it has {_listing(path)}",
                "check the path: unirl train writes to runs/NAME",
            )
    parent = Path(word).parent if "/" in word else Path("runs")
    names = [child.name for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else []
    near = configs.suggestion(Path(word).name, names)
    raise UniRLError(
        f'run "{word}" does not exist',
        f"{parent}/ has {', '.join(sorted(names)[:8]) or 'no runs'}",
        near or "check the path, or start it with unirl train",
    )


def _run_dir(path: Path) -> Path:
    """The run folder of a path that may be one of its checkpoints."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def _listing(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir())
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"


def _deterministic(options: EvalOptions | PlayOptions, plan: Plan) -> bool:
    if options.deterministic or options.stochastic:
        return options.deterministic
    return plan.run.eval_deterministic


def _no_evaluation(plan: Plan, how: str) -> UniRLError:
    return UniRLError(
        f'recipe "{plan.recipe}" cannot be {how}',
        "its plan has no evaluator that could",
        "set make_evaluator in the recipe's plan",
    )


# ---------------------------------------------------------------------------------- list and bench


def list_things(arguments: Sequence[str]) -> int:
    """`unirl list`: environments, recipes, engines or shipped configs, one per line."""
    kinds: dict[str, Callable[[], dict[str, str]]] = {
        "envs": _list_envs,
        "recipes": _list_recipes,
        "engines": _list_engines,
        "configs": _list_configs,
    }
    positional, _ = _parse(arguments, NoOptions)
    if not positional or positional[0] not in kinds or len(positional) > 2:
        found = " ".join(positional) or "nothing"
        raise UniRLError(
            f'"{found}" cannot be listed',
            f"there are {', '.join(kinds)}, each with a filter if wanted",
            configs.suggestion(positional[0] if positional else "", kinds)
            or "unirl list envs Pong",
        )
    wanted = positional[1].lower() if len(positional) == 2 else ""
    things = kinds[positional[0]]()
    width = max((len(name) for name in things), default=0)
    for name, text in things.items():
        if wanted in f"{name} {text}".lower():
            print(f"{name:<{width}}  {text}".rstrip())
    return 0


def _list_envs() -> dict[str, str]:
    from unirl.envs.make import known_env_ids

    return {env_id: "atari" if env_id.startswith("ALE/") else "" for env_id in known_env_ids()}


def _list_recipes() -> dict[str, str]:
    # A recipe's module imports torch: its docstring is read without running it.
    found = {}
    for name, module in registry.RECIPES.items():
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        found[name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def _list_engines() -> dict[str, str]:
    modules = {"envpool": "envpool", "ale": "ale_py"}
    missing = {name for name, module in modules.items() if importlib.util.find_spec(module) is None}
    return {n: text + (" (not installed)" if n in missing else "") for n, text in ENGINES.items()}


def _list_configs() -> dict[str, str]:
    found = {}
    for name, path in _shipped_configs().items():
        first = path.read_text().partition("\n")[0]
        found["@" + name] = first.lstrip("# ") if first.startswith("#") else ""
    return found


def bench(arguments: Sequence[str]) -> int:
    """`unirl bench`: run the benchmark scripts of a clone, all suites or one."""
    suite = arguments[0] if arguments else None
    if suite is not None and suite not in SUITES:
        raise UniRLError(
            f'benchmark suite "{suite}" is unknown',
            f"there are {', '.join(SUITES)}",
            configs.suggestion(suite, SUITES) or "unirl bench runs all of them",
        )
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    if not folder.is_dir():
        raise UniRLError(
            "benchmarks are not installed",
            f"they lie in benchmarks/ of a clone; there is no {folder}",
            "clone the repository and run unirl bench there",
        )
    for name in [suite] if suite is not None else list(SUITES):
        for pattern, *words in SUITES[name]:
            scripts = sorted(folder.glob(pattern))
            if not scripts:
                raise UniRLError(
                    f'benchmark suite "{name}" has no scripts here',
                    f"it runs {pattern}, and {folder} has no such file",
                    "update the clone",
                )
            for script in scripts:
                command = [sys.executable, str(script), *words, *arguments[1:]]
                print(f"== {shlex.join(command[1:])}", flush=True)
                done = subprocess.run(command, cwd=folder.parent)
                if done.returncode:
                    return done.returncode
    return 0


# -------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Command:
    """One subcommand: how it is called, what it does, its flags."""

    usage: str
    summary: str
    run: Callable[[Sequence[str]], int]
    options: type = NoOptions


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "RECIPE [@CONFIG ...] [--key value ...]", "Train a recipe.", train, TrainOptions
    ),
    "resume": Command(
        "RUN [--key value ...]", "Go on from the newest checkpoint.", resume, ResumeOptions
    ),
    "eval": Command("RUN", "Play whole episodes and report the return.", evaluate, EvalOptions),
    "play": Command("RUN", "Write a video of the policy.", play, PlayOptions),
    "plot": Command("RUN ...", "Draw return against steps and seconds.", plot, PlotOptions),
    "card": Command("RUN", "Write a README.md for the run.", card),
    "list": Command("envs|recipes|engines|configs [FILTER]", "Show what there is.", list_things),
    "bench": Command("[queue|classic [--flag ...]]", "Run benchmarks (in a clone).", bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a bug, 2 for what the user can mend."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        return _dispatch(words)
    except UniRLError as error:
        if debug:
            traceback.print_exc()
        _print_error(error.parts)
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (head, less) has enough; Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        cause, log = (error.__cause__, error.log) if isinstance(error, _Crash) else (error, None)
        _print_error(
            (
                f"unexpected {type(cause).__name__}: {cause}",
                f"the full trace is in {log or _write_trace(error)}",
                "--debug shows it here; if UniRL is to blame, please report it with the trace",
            )
        )
        return EXIT_BUG


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("--version", "-V"):
        import unirl

        print(f"unirl {unirl.__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise UniRLError(
            f'command "{name}" is unknown',
            f"there are {', '.join(COMMANDS)}",
            configs.suggestion(name, COMMANDS) or "see unirl --help",
        )
    if "-h" in rest or "--help" in rest:
        print(_help(name, [word for word in rest if word not in ("-h", "--help")]))
        return 0
    return COMMANDS[name].run(rest)


def _parse(
    arguments: Sequence[str], options: type[configs.T], short: Mapping[str, str] | None = None
) -> tuple[list[str], configs.T]:
    positional, flags = configs.parse_flags(arguments, options, short=short)
    return positional, configs.from_mapping(options, flags)


def _first(arguments: Sequence[str], command: str) -> str:
    if not arguments or arguments[0].startswith("-"):
        raise _missing_run(command)
    return arguments[0]


def _one_run(positional: Sequence[str], command: str) -> str:
    if not positional:
        raise _missing_run(command)
    if len(positional) > 1:
        raise UniRLError(
            f'"{positional[1]}" is one argument too many',
            f"unirl {command} takes one run",
            f"call it once per run, or see unirl {command} --help",
        )
    return positional[0]


def _missing_run(command: str) -> UniRLError:
    return UniRLError(
        "no run was given",
        f"unirl {command} takes a run folder first",
        f"try unirl {command} runs/NAME",
    )


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = ["usage: unirl COMMAND ...", ""]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "unirl COMMAND --help explains a command, unirl train RECIPE --help every key of a recipe.",
        "  --version  print the version    --debug  show full traces",
        "",
        "  unirl train @cartpole",
        "  unirl train impala --env.id ALE/Pong-v5 --queue.max-staleness 2",
    ]
    return "\n".join(lines)


def _help(name: str, rest: Sequence[str]) -> str:
    command = COMMANDS[name]
    lines = [f"usage: unirl {name} {command.usage}", "", command.summary]
    lines += _help_table(command.options)
    if name == "train":
        recipe, files = _recipe_and_files(rest)
        for path in files:
            recipe = recipe or configs.load_toml(path).get("recipe")
        if recipe is None:
            lines += ["", "every key of a recipe: unirl train impala --help"]
        else:
            lines += _help_table(registry.recipe(recipe).Config)
    return "\n".join(lines)


def _help_table(cls: type) -> list[str]:
    lines, table = [], None
    for item in configs.fields_help(cls):
        if item.key.rpartition(".")[0] != table:
            table = item.key.rpartition(".")[0]
            lines += ["", f"[{table}]"] if table else [""]
        default = f" (default {item.default})" if item.default else " (required)"
        lines.append(f"  {configs.flag_of(item.key)}  {item.kind}{default}")
        doc = " ".join(item.doc.split())
        lines += textwrap.wrap(doc, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return lines


def _print_error(parts: Sequence[str]) -> None:
    red, plain = ("\x1b[31m", "\x1b[0m") if _is_colourful() else ("", "")
    first, *others = parts
    print(f"{red}error: {first}{plain}", file=sys.stderr)
    for part in others:
        print(f"{red}       {part}{plain}", file=sys.stderr)


def _is_colourful() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _write_trace(error: BaseException) -> Path:
    handle, path = tempfile.mkstemp(prefix="unirl-error-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        traceback.print_exception(error, file=file)
    return Path(path)

"""The `unirl` command and its subcommands.

Nothing heavy is imported until a command needs it: `unirl --help` and `unirl list` answer at once.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType

from unirl import config as configs
from unirl import registry
from unirl.commands.algorithms import AlgorithmsOptions, algorithms
from unirl.commands.arguments import recipe_and_files
from unirl.commands.bench import BenchOptions, ClusterOptions, bench
from unirl.commands.command import Command
from unirl.commands.doctor import DoctorOptions, doctor
from unirl.commands.export import ExportOptions, export
from unirl.commands.inspect import (
    EvalOptions,
    PlayOptions,
    PlotOptions,
    card,
    evaluate,
    play,
    plot,
)
from unirl.commands.listing import list_things
from unirl.commands.model import model
from unirl.commands.push import PushOptions, push
from unirl.commands.resume import ResumeOptions, resume
from unirl.commands.scale import scale
from unirl.commands.serve import ServeOptions, serve
from unirl.commands.session import Crash
from unirl.commands.sweep import sweep
from unirl.commands.train import TrainOptions, train
from unirl.commands.trajectories import TrajectoriesOptions, trajectories
from unirl.commands.tune import TuneOptions, tune
from unirl.commands.view import ViewOptions, view
from unirl.errors import UniRLError
from unirl.report.output import lasting_output
from unirl.storage import disk
from unirl.sweep.config import SweepOptions

EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": Command(
            "RECIPE [@CONFIG ...] [--key value ...]",
            "Train a recipe.",
            train,
            TrainOptions,
            outlives_console=True,
        ),
        "resume": Command(
            "RUN [--key value ...]",
            "Continue from the newest checkpoint.",
            resume,
            ResumeOptions,
            outlives_console=True,
        ),
        "scale": Command("RUN POOL N", "Give a run that trains more or fewer members.", scale),
        "eval": Command(
            "RUN [--key value ...]",
            "Play whole episodes and report the return.",
            evaluate,
            EvalOptions,
        ),
        "play": Command("RUN", "Write a video of the policy.", play, PlayOptions),
        "plot": Command("RUN ...", "Draw return against steps and seconds.", plot, PlotOptions),
        "view": Command(
            "[RUN|FOLDER ...] [--port N] [--open] [--save FILE]",
            "Show runs and their trajectories in a browser.",
            view,
            ViewOptions,
        ),
        "card": Command("RUN", "Write a README.md for the run.", card),
        "trajectories": Command(
            "RUN [--task T] [--episode ID] [--export atif|verifiers|otlp] [--key value ...]",
            "Show, filter and export the stored episodes of a run.",
            trajectories,
            TrajectoriesOptions,
        ),
        "list": Command(
            "envs|recipes|engines|configs [FILTER]", "Show what there is.", list_things
        ),
        "bench": Command(
            "atari|mujoco|classic|RECIPE|@CONFIG|cluster|scripts [--key value ...]",
            "Measure each stage of a plan and say which one limits it.",
            bench,
            BenchOptions,
        ),
        "tune": Command(
            "RECIPE|@CONFIG ... [--key value ...]",
            "Try shapes of a plan and write the fastest as TOML.",
            tune,
            TuneOptions,
        ),
        "sweep": Command(
            "FILE|RUN [--dry-run] [--key value ...]",
            "Train many trials of a config and find the best.",
            sweep,
            SweepOptions,
            outlives_console=True,
        ),
        "doctor": Command(
            "[RECIPE|@CONFIG ...] [--json] [--ray.address A]",
            "Say what of this machine, or of a cluster's nodes, would hold a run back.",
            doctor,
            DoctorOptions,
        ),
        "model": Command("smollm2|tiny DIR", "Write a small language model as a folder.", model),
        "serve": Command(
            "MODEL|RUN",
            "Serve a language model to clients of OpenAI's or Anthropic's API.",
            serve,
            ServeOptions,
        ),
        "export": Command(
            "RUN DIR [--format hf|onnx|torchscript|safetensors]",
            "Write what a run learned as files that are used without UniRL.",
            export,
            ExportOptions,
        ),
        "push": Command(
            "RUN USER/NAME [--private]",
            "Write what a run learned, and its card, to the Hugging Face hub.",
            push,
            PushOptions,
        ),
        "algorithms": Command(
            "[NAME | diff A B]",
            "Show the named algorithms for language models, and how two differ.",
            algorithms,
            AlgorithmsOptions,
        ),
    }
)
"""Subcommands by name, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a bug, 2 for what the user can fix."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _find_own_modules()
    command = COMMANDS.get(words[0]) if words else None
    with lasting_output() if command and command.outlives_console else nullcontext():
        return _run(words)


def _find_own_modules() -> None:
    """What settings name (env.import_module, a reward) may be a file of the folder that the command
    is called in. It comes last, so that it replaces nothing that is installed.
    """
    with suppress(FileNotFoundError):  # the folder was deleted
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def _run(words: list[str]) -> int:
    # Before torch is loaded: OpenMP threads that spin while they wait take a core from the
    # simulator, and beside one busy process elsewhere they make everything ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        with disk.explained(Path(), "free some space, then call it again", "the output or a file"):
            code = _dispatch(words)
            sys.stdout.flush()  # here, where an error can still be explained
        return code
    except UniRLError as error:
        if debug:
            traceback.print_exc()
        _print_error(error.parts)
        _drop_output()
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # what read it (head, less) has enough
        return 0
    except Exception as error:
        if debug:
            raise
        cause, log = (error.__cause__, error.log) if isinstance(error, Crash) else (error, None)
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
    asks = {"-h", "--help"} & set(rest) or (name == "train" and "--all" in rest)
    if asks:
        words = [word for word in rest if word not in ("-h", "--help", "--all")]
        print(_help(name, words, short="--all" not in rest))
        return 0
    return COMMANDS[name].run(rest)


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = ["usage: unirl COMMAND ...", ""]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "unirl COMMAND --help explains a command, unirl train RECIPE --help the common",
        "keys of a recipe, unirl train RECIPE --help --all every one of them.",
        "  --version  print the version    --debug  show full traces",
        "",
        "  unirl train @cartpole",
        "  unirl train impala --env.id ALE/Pong-v5 --queue.max-staleness 2",
    ]
    return "\n".join(lines)


def _help(name: str, rest: Sequence[str], *, short: bool) -> str:
    command = COMMANDS[name]
    lines = [f"usage: unirl {name} {command.usage}", "", command.summary]
    if (name, *rest[:1]) == ("bench", "cluster"):
        from unirl.bench.cluster_shape import ClusterShape

        lines += _help_table(configs.fields_help(ClusterOptions))
        return "\n".join(lines + _help_table(configs.fields_help(ClusterShape)))
    lines += _help_table(configs.fields_help(command.options))
    if name == "train":
        recipe, files = recipe_and_files(rest, TrainOptions)
        for path in files:
            recipe = recipe or configs.load_toml(path).get("recipe")
        if recipe is None:
            lines += ["", "the keys of a recipe: unirl train impala --help"]
        else:
            items = configs.fields_help(registry.recipe(recipe).Config)
            common = [item for item in items if item.is_common] if short else []
            lines += _help_table(common or items)
            if common:
                whole = shlex.join(["unirl", "train", *rest, "--help", "--all"])
                lines += ["", f"{len(items) - len(common)} more keys: {whole}"]
    return "\n".join(lines)


def _help_table(items: Iterable[configs.FieldHelp]) -> list[str]:
    lines, table = [], None
    for item in items:
        if item.key.rpartition(".")[0] != table:
            table = item.key.rpartition(".")[0]
            lines += ["", f"[{table}]"] if table else [""]
        default = f" (default {item.default})" if item.default else " (required)"
        head = f"  {configs.flag_of(item.key)}  {item.kind}{default}"
        lines += _wrapped(head, "", " " * 6) + _wrapped(" ".join(item.doc.split()), *[" " * 8] * 2)
    return lines


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _print_error(parts: Sequence[str]) -> None:
    is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    red, plain = ("\x1b[31m", "\x1b[0m") if is_coloured else ("", "")
    first, *others = parts
    print(f"{red}error: {first}{plain}", file=sys.stderr)
    for part in others:
        print(f"{red}       {part}{plain}", file=sys.stderr)


def _drop_output() -> None:
    """Drop what standard output does not take: Python must not complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_trace(error: BaseException) -> Path:
    handle, path = tempfile.mkstemp(prefix="unirl-error-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        traceback.print_exception(error, file=file)
    return Path(path)

"""The card of a run: a README.md of what was trained, how well it does, and how to repeat it."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from unirl.errors import UniRLError
from unirl.report.sinks import no_run, read_metrics
from unirl.run_events import read_events, wall_time
from unirl.storage import disk

_RETURN = "charts/episodic_return"
_PACKAGES = ("unirl", "torch", "numpy", "gymnasium", "ale-py", "envpool", "mujoco")


def write_card(run_dir: Path) -> Path:
    """Write README.md into a run folder from what is there, and return its path.

    Raises UniRLError when `run_dir` holds no run. Packages and machine are those of the writing.
    """
    path = Path(run_dir) / "README.md"
    disk.replace_text(path, card_text(Path(run_dir)))
    return path


def card_text(run_dir: Path, *, usage: str | None = None) -> str:
    """The card of a run. usage: what it says of how to use it, in place of UniRL's commands and of
    pictures, which are files of the run folder.
    """
    config = read_run_config(run_dir)
    sections = [
        f"# {_title(config, run_dir)}",
        *_summary(run_dir),
        *_evaluations(run_dir),
        *_events(run_dir),
        *(_pictures(run_dir) if usage is None else ()),
        *_reproduce(run_dir),
        "## Use",
        _commands(run_dir) if usage is None else usage,
        *_config(run_dir),
        *_machine(),
    ]
    return "\n\n".join(sections) + "\n"


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """The tables of its config.toml."""
    path = run_dir / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise no_run(run_dir, path) from None
    except ValueError as error:
        raise UniRLError(
            f"{path} is damaged", f"it must be TOML, but {error}", "restore it"
        ) from None


def _title(config: dict[str, Any], run_dir: Path) -> str:
    recipe, env = config.get("recipe"), config.get("env")
    env_id = env.get("id") if isinstance(env, dict) else None
    if recipe is None:
        return run_dir.resolve().name
    return f"{str(recipe).upper()} on {env_id}" if env_id else str(recipe).upper()


def _summary(run_dir: Path) -> Iterator[str]:
    if not (run_dir / "metrics.jsonl").is_file():
        return
    rows = read_metrics(run_dir)
    if not rows:
        return
    last = rows[-1]
    facts = [f"{last['step']:,} environment steps in {_duration(last['seconds'])}"]
    if last["seconds"] > 0:
        facts[0] += f" ({last['step'] / last['seconds']:,.0f} steps/s)"
    returns = [row[_RETURN] for row in rows if row.get(_RETURN) is not None]
    if returns:
        facts.append(f"Training return at the end {returns[-1]:.1f}, at best {max(returns):.1f}")
    yield "Trained with UniRL: " + ". ".join(facts) + "."


def _evaluations(run_dir: Path) -> Iterator[str]:
    training = _results(run_dir / "eval")
    by_hand = _results(run_dir / "eval" / "by_hand")
    training.sort(key=lambda result: result.get("step", math.inf))
    by_hand.sort(key=lambda result: (-_num_episodes(result), -result.get("step", 0)))
    tables = [("During training:", training[-10:]), ("By `unirl eval`:", by_hand[:10])]
    # What rests on more episodes comes first.
    tables.sort(key=lambda table: max(map(_num_episodes, table[1]), default=0), reverse=True)
    if training or by_hand:
        yield "## Evaluation"
    for title, results in tables:
        if results:
            yield title
            names = list(dict.fromkeys(name for result in results for name in result))
            rows = [[_cell(name, result.get(name)) for name in names] for result in results]
            yield _table([name.replace("_", " ") for name in names], rows)


def _results(folder: Path) -> list[dict[str, Any]]:
    """What fits into a table of each file of a folder."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # torn by a kill; the card shows those that are whole
        if isinstance(result, dict):
            shown: dict[str, Any] = {
                name: value
                for name, value in result.items()
                if isinstance(value, bool | int | float)
            }
            if isinstance(changes := result.get("changes"), dict):
                shown["changes"] = ", ".join(f"{key} {value}" for key, value in changes.items())
            results.append(shown)
    return results


def _num_episodes(result: dict[str, Any]) -> int:
    return int(result.get("num_episodes", 0))


def _events(run_dir: Path) -> Iterator[str]:
    """What happened to its members, where something did."""
    rows = [row for row in read_events(run_dir) if row["event"] not in ("started", "left")]
    if any(row["event"] not in ("ended", "resumed") for row in rows):
        counts = Counter(str(row["event"]) for row in rows)
        yield "## Events"
        yield ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in counts.items())
        names = ("event", "member", "pool", "node", "cause")
        texts = [[_cell(name, str(row.get(name, ""))) for name in names] for row in rows[-20:]]
        times = [wall_time(row.get("time", 0.0)) for row in rows[-20:]]
        shown = [[when, *text] for when, text in zip(times, texts, strict=True)]
        yield _table(["time", *names], shown)


def _pictures(run_dir: Path) -> Iterator[str]:
    for path in sorted(run_dir.glob("*.png")):
        yield f"![{path.stem}]({path.name})"
    for path in sorted((run_dir / "videos").glob("*")):
        if path.suffix in (".gif", ".mp4"):
            picture = "!" if path.suffix == ".gif" else ""
            yield f"{picture}[{path.stem}](videos/{path.name})"


def best_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """The newest result of those that rest on the most episodes."""
    found = [*_results(run_dir / "eval"), *_results(run_dir / "eval" / "by_hand")]
    found = [result for result in found if "return_mean" in result]
    return max(found, key=lambda r: (_num_episodes(r), r.get("step", 0)), default=None)


def _reproduce(run_dir: Path) -> Iterator[str]:
    command = run_dir / "command.txt"
    if command.is_file():
        yield "## Reproduce"
        yield f"```sh\n{command.read_text(encoding='utf-8').strip()}\n```"


def _commands(run_dir: Path) -> str:
    run = shlex.quote(str(run_dir))
    commands = [
        f"unirl resume {run}          # train on from the newest checkpoint",
        f"unirl eval {run}            # play whole episodes and report their returns",
        f"unirl play {run} --video    # watch it",
    ]
    return "```sh\n" + "\n".join(commands) + "\n```"


def _config(run_dir: Path) -> Iterator[str]:
    text = (run_dir / "config.toml").read_text(encoding="utf-8").strip()
    yield "## Configuration"
    yield f"```toml\n{text}\n```"


def _machine() -> Iterator[str]:
    yield "## Machine"
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    rows = [
        ["Python", platform.python_version()],
        *([name, version] for name in _PACKAGES if (version := _version(name))),
        ["system", f"{platform.system()} {platform.release()}"],
        ["processor", f"{_processor()}, {os.cpu_count()} cores, {memory_gb:.0f} GB"],
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        rows.append(["GPU", ", ".join(names)])
    yield _table(["", "at the writing of this card"], rows)


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # with its build, which its package does not always name
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(name: str, value: float | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str) or name == "seed":
        return str(value).replace("|", "\\|")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} minutes"

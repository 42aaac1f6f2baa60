"""`unirl trajectories`: the stored episodes of a run, as a table, one by one, or as files."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unirl import config as configs
from unirl.commands import run_folder
from unirl.commands.arguments import one_run, parse
from unirl.errors import UniRLError
from unirl.imports import large_imports

if TYPE_CHECKING:
    from unirl.llm.trajectories.filter import Filter
    from unirl.llm.trajectories.record import Record
    from unirl.llm.trajectories.store import TrajectoryStore


@dataclass(frozen=True)
class TrajectoriesOptions:
    """Flags of `unirl trajectories`."""

    task: str | None = None
    """Episodes of this task alone."""
    ending: str | None = None
    """Those that ended so: stop, max_turns, context, time, invalid, crash, infrastructure."""
    reward_min: float | None = None
    """Those with at least this reward."""
    reward_max: float | None = None
    """Those with at most this reward."""
    version: int | None = None
    """Those of which this version of the weights drew some tokens."""
    ticket: int | None = None
    """Those of this ticket: a group's side by side."""
    limit: int = 20
    """Lines of the table, newest first; an export without --limit has all."""
    episode: int | None = None
    """Show the episode of this number, turn by turn."""
    step: int | None = None
    """With --episode: this turn alone, with its token ids; only its bytes are read."""
    query: Literal["", "endings", "passes", "tools", "forks", "updates"] = ""
    """A summary instead: endings by task; share of positive rewards by task and version; tokens and
    seconds by tool; forks by agent; what was learned at each update.
    """
    export: Literal["", "atif", "verifiers", "otlp"] = ""
    """Write the episodes in another format: one JSON object a line; otlp: one for all."""
    out: str = "-"
    """export: a file, - for the console, or for otlp an address, http://HOST:4318/v1/traces."""
    json: bool = False
    """Print JSON, one object a line."""
    store_url: str = ""
    """env:NAME, the variable with the URL of the database, where config.toml does not keep it."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UniRLError(
                f"--limit is {self.limit}", "--limit >= 1 must hold", "20 is the default"
            )


def trajectories(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, TrajectoriesOptions)
    where = run_folder.folder_of(run_folder.find(one_run(positional, "trajectories")))
    if options.step is not None and options.episode is None:
        raise UniRLError("--step names no turn", "it goes with --episode", "add --episode ID")
    with large_imports():
        from unirl.llm.trajectories import reading
        from unirl.llm.trajectories.config import FILE
        from unirl.llm.trajectories.filter import Filter
    reading.check_url(options.store_url)
    config = reading.settings_to_read(configs.load_toml(where / "config.toml"), options.store_url)
    if not config.url and not (where / FILE).is_file():
        raise UniRLError(
            f"{where} has no stored trajectories",
            f"runs of agents write {FILE} there, unless store.enabled is false",
            "train an agent, or name another run",
        )
    names = ("task", "ending", "reward_min", "reward_max", "version", "ticket")
    which = Filter(**{name: getattr(options, name) for name in names})
    with closing(reading.open_to_read(config, where)) as store:
        if options.export:
            limit = None if "--limit" not in " ".join(arguments) else options.limit
            _export(store, which, options, limit)
        elif options.episode is not None:
            _show(store, options.episode, options)
        elif options.query:
            _answer(store, options)
        else:
            _table(store, which, options)
    return 0


def _table(store: TrajectoryStore, which: Filter, options: TrajectoriesOptions) -> None:
    from unirl.llm.trajectories.view import table

    rows = store.find(which, limit=options.limit)
    if options.json:
        for row in rows:
            print(json.dumps({**row, "scores": json.loads(row["scores"])}))
        return
    for line in table(rows):
        print(line)
    total = store.count(which)
    if total > len(rows):
        print(f"{len(rows)} of {total} episodes; --limit shows more")


def _show(store: TrajectoryStore, number: int, options: TrajectoriesOptions) -> None:
    from unirl.llm.trajectories.exports.atif import to_atif
    from unirl.llm.trajectories.view import episode, turn_lines

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if options.step is not None:
        turn = store.turn(number, options.step)
        if options.json:
            print(json.dumps(_plain(turn), default=repr))
            return
        for line in turn_lines(turn, options.step, colour=colour, ids=True):
            print(line)
        return
    record = store.get(number)
    if options.json:
        print(json.dumps(to_atif(record, str(number))))
        return
    for line in episode(record, number, colour=colour):
        print(line)


def _plain(turn: object) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(turn)  # type: ignore[call-overload,no-any-return]


def _answer(store: TrajectoryStore, options: TrajectoriesOptions) -> None:
    from unirl.llm.trajectories.queries import answer
    from unirl.llm.trajectories.view import printable

    columns, rows = answer(store, options.query)
    if options.json:
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True))))
        return
    texts = [[f"{v:.4g}" if isinstance(v, float) else printable(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    for line in [columns, *texts]:
        cells = zip(line, widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip())


def _export(
    store: TrajectoryStore, which: Filter, options: TrajectoriesOptions, limit: int | None
) -> None:
    from unirl.llm.trajectories.exports import otlp
    from unirl.llm.trajectories.exports.atif import to_atif
    from unirl.llm.trajectories.exports.verifiers import to_verifiers

    records = _records(store, which, options, limit)
    is_address = options.out.startswith(("http://", "https://"))
    if is_address and options.export != "otlp":
        raise UniRLError(
            f"--out is {options.out}", "only otlp is sent to an address", "name a file with --out"
        )
    if is_address:
        count = 0
        for pair in records:  # one request each: collectors refuse large ones
            otlp.post(otlp.to_otlp([pair]), options.out)
            count += 1
        print(f"sent {count} episodes to {options.out}")
        return
    if options.export == "otlp":
        lines = iter([otlp.to_otlp(records)])
    elif options.export == "atif":
        lines = (to_atif(record, str(number)) for number, record in records)
    else:
        lines = (to_verifiers(record, number) for number, record in records)
    if options.out == "-":
        for line in lines:
            print(json.dumps(line))
        return
    out, count = Path(options.out), 0
    # Texts of users: nobody else reads them.
    with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # not /dev/stdout
            os.fchmod(file.fileno(), 0o600)  # of one that was there
        for line in lines:
            file.write(json.dumps(line) + "\n")
            count += 1
    print(f"wrote {out}, {count} lines")


def _records(
    store: TrajectoryStore, which: Filter, options: TrajectoriesOptions, limit: int | None
) -> Iterator[tuple[int, Record]]:
    from unirl.llm.trajectories.databases.database import BodyDropped
    from unirl.llm.trajectories.store import each_id

    if options.episode is not None:
        yield options.episode, store.get(options.episode)
        return
    for count, number in enumerate(each_id(store, which)):
        if limit is not None and count >= limit:
            return
        try:
            yield number, store.get(number)
        except BodyDropped:
            continue  # it has expired since it was listed

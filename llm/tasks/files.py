"""Tasks from JSON lines, Parquet files and Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from unirl.errors import UniRLError, suggestion
from unirl.llm.packages import needs
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.task import Example, Examples, Message, Subset, Task, checked_options, split


class FileRows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


Reader: TypeAlias = Callable[[str], FileRows]
"""Rows of a file by its path, or of a dataset by the name of a split."""


@dataclass(frozen=True)
class JsonLines:
    """The lines of a file as they are; each is parsed when it is asked for."""

    path: str
    lines: Sequence[tuple[int, bytes]]
    """With their numbers: empty lines do not count as rows."""

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        number, line = self.lines[index]
        try:
            row = json.loads(line)
        except ValueError as error:
            raise self._wrong(number, str(error)) from None
        if not isinstance(row, dict):
            raise self._wrong(number, f"it holds {type(row).__name__}")
        return row

    def _wrong(self, number: int, found: str) -> UniRLError:
        return UniRLError(
            f"line {number} of {self.path} cannot be read",
            f"every line is a JSON object; {found}",
            "fix the line, or remove it",
        )


@dataclass(frozen=True)
class ParquetRows:
    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self.table.slice(index, 1).to_pylist()[0]
        return row


@dataclass(frozen=True)
class RowExamples:
    rows: FileRows
    source: str
    prompt_field: str
    answer_field: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Example:
        row = self.rows[index]
        prompt = self._field(row, index, self.prompt_field, "prompt_field")
        answer = ""
        if self.answer_field:
            answer = self._field(row, index, self.answer_field, "answer_field")
            answer = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        used = (self.prompt_field, self.answer_field)
        info = {name: value for name, value in row.items() if name not in used}
        return Example(answer=answer, messages=self._messages(prompt, index), info=info)

    def _messages(self, prompt: Any, index: int) -> tuple[Message, ...]:
        if isinstance(prompt, str):
            return ({"role": "user", "content": prompt},)
        turns = list(prompt) if isinstance(prompt, list | tuple | np.ndarray) else []
        if turns and all(isinstance(t, Mapping) and {"role", "content"} <= set(t) for t in turns):
            return tuple(turns)
        raise UniRLError(
            f'field "{self.prompt_field}" of row {index} of {self.source} is no prompt',
            "expected text or a list of messages with role and content, found "
            + type(prompt).__name__,
            "name another field in task.prompt_field",
        )

    def _field(self, row: Mapping[str, Any], index: int, name: str, key: str) -> Any:
        if row.get(name) is not None:
            return row[name]
        near = suggestion(name, row) if name not in row else ""
        remedy = f"set task.{key} to one of them"
        if key == "answer_field":
            remedy += ', or to "" if there is none'
        raise UniRLError(
            f'row {index} of {self.source} has no field "{name}"',
            f"it has {', '.join(row)}" if name not in row else "its value is null",
            f"{near} Set task.{key}" if near else remedy,
        )


def file_task(name: str, config: TaskConfig) -> Task:
    """The task of `jsonl:PATH`, `parquet:PATH` or `hf:NAME`. Raises UniRLError for a file that is
    missing and a first row that lacks a field.
    """
    kind, _, where = name.partition(":")
    known = ("subset", "split", "eval_split") if kind == "hf" else ("eval",)
    options = checked_options(name, config, known)

    def examples(rows: FileRows, source: str) -> Examples:
        made = RowExamples(rows, source, config.prompt_field, config.answer_field)
        if len(made):
            made[0]
        return made

    read = READERS[kind](where, options)
    is_hub = kind == "hf"
    rows = read(options.get("split", "train") if is_hub else where)
    all_examples = examples(rows, where)
    other = options.get("eval_split" if is_hub else "eval")
    # Without a reward of its own: only its author knows what an answer is worth.
    if other is None:
        train, held_out = split(len(rows), config, name)
        return Task(name, Subset(all_examples, train), Subset(all_examples, held_out))
    return Task(
        name,
        _first(all_examples, config.num_train),
        _first(examples(read(other), where if is_hub else other), config.num_eval),
    )


def _first(examples: Examples, most: int | None) -> Examples:
    size = len(examples) if most is None else min(most, len(examples))
    return Subset(examples, np.arange(size))


def _jsonl_reader(where: str, options: Mapping[str, str]) -> Reader:
    def read(path: str) -> FileRows:
        lines = _existing(path).read_bytes().splitlines()
        kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        return JsonLines(path, kept)

    return read


def _parquet_reader(where: str, options: Mapping[str, str]) -> Reader:
    with needs("pyarrow", f'task "parquet:{where}" cannot be read'):
        from pyarrow import parquet

    return lambda path: ParquetRows(parquet.read_table(_existing(path)))


def _dataset_reader(where: str, options: Mapping[str, str]) -> Reader:
    with needs("datasets", f'task "hf:{where}" cannot be read'):
        import datasets

    def read(name: str) -> FileRows:
        try:
            rows: FileRows = datasets.load_dataset(where, options.get("subset"), split=name)
        except Exception as error:  # many kinds: unknown name, no network, unknown subset or split
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UniRLError(
                f'dataset "{where}" cannot be loaded',
                f'its split "{name}" was asked for: {reason[0]}',
                "check the name, task.options.subset and task.options.split",
            ) from error
        return rows

    return read


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if found.is_file():
        return found
    folder = found.parent
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    raise UniRLError(
        f"file {path} does not exist",
        f"it was looked for in {folder.resolve()}"
        + ("" if folder.is_dir() else ", which does not exist either"),
        suggestion(found.name, entries) or "check task.name",
    )


READERS: Mapping[str, Callable[[str, Mapping[str, str]], Reader]] = MappingProxyType(
    {"jsonl": _jsonl_reader, "parquet": _parquet_reader, "hf": _dataset_reader}
)
"""By the word before the colon: made of what follows it and the task's options."""

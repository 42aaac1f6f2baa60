"""A command line split into arguments and flags that name the keys of configs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from unirl.config.field_help import FieldHelp, fields_help, flag_of
from unirl.config.spelling import unknown_key
from unirl.config.tables import canonical
from unirl.config.values import SWITCH_WORDS, Text
from unirl.errors import UniRLError


def parse_flags(
    arguments: Sequence[str],
    cls: type,
    *others: type,
    short: Mapping[str, str] | None = None,
    alone: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, Text]]:
    """Split a command line into positional arguments and flags by dotted key of the given configs.

    --a.b value, --a.b=value; for true or false also --a.b and --no-a.b; `--` ends the flags.
    A class may have NICKNAMES, {"model": "model.path"}: what --model means instead of a table.
    short: {"-o": "out"}. alone: {"video": "none"}, what a flag means that no value follows.
    Of a flag given twice, the last one counts.
    Raises UniRLError for a flag that no config knows and for one without its value.
    """
    classes, short, alone = (cls, *others), short or {}, alone or {}
    known = {item.key: item for kind in classes for item in fields_help(kind)}
    nicknames: dict[str, str] = {}
    for kind in classes:
        nicknames |= getattr(kind, "NICKNAMES", {})
    positional: list[str] = []
    flags: dict[str, Text] = {}
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if argument == "--":
            positional += reversed(waiting)
            break
        if argument in short:
            argument = "--" + short[argument]
        if not argument.startswith("--"):
            _refuse_one_hyphen(argument, short)
            positional.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = nicknames.get(name, name)
        key, item, negated = _find_flag(name, known, classes)
        if item is None:
            raise unknown_key(_owner(name, classes), name, flag=True)
        if not equals:
            stands_alone = key in alone and not _has_value(waiting, short)
            value = alone[key] if stands_alone else _take_value(key, item, negated, waiting, short)
        if negated:
            value = "false" if SWITCH_WORDS.get(value.lower(), True) else "true"
        flags[key] = Text(value)
    return positional, flags


def _refuse_one_hyphen(argument: str, short: Mapping[str, str]) -> None:
    if argument.startswith("-") and len(argument) > 1 and not _is_number(argument):
        raise UniRLError(
            f"flag {argument} is unknown",
            "flags begin with two hyphens" + (f", besides {', '.join(short)}" if short else ""),
            "--help explains them",
        )


def _take_value(
    key: str, item: FieldHelp, negated: bool, waiting: list[str], short: Mapping[str, str]
) -> str:
    """The value of a flag that came without `=`: the next word, which a switch can do without."""
    if item.is_switch:
        typed = waiting and waiting[-1].lower() in SWITCH_WORDS and not negated
        return waiting.pop() if typed else "true"
    if not _has_value(waiting, short):
        value = item.default.strip('"') or "VALUE"
        raise UniRLError(
            f"flag {flag_of(key)} has no value",
            f"it takes {item.kind}",
            f"write {flag_of(item.key)} {value}",
        )
    return waiting.pop()


def _has_value(waiting: Sequence[str], short: Mapping[str, str]) -> bool:
    return bool(waiting) and not waiting[-1].startswith("--") and waiting[-1] not in short


def _find_flag(
    name: str, known: Mapping[str, FieldHelp], classes: tuple[type, ...]
) -> tuple[str, FieldHelp | None, bool]:
    """The key a flag means, its field, and whether it was negated (--no-a.b or --a.no-b)."""
    table, _, leaf = name.rpartition(".")
    denied = [name[3:]] if name.startswith("no-") else []
    denied += [f"{table}.{leaf[3:]}"] if table and leaf.startswith("no-") else []
    for candidate, negated in [(name, False), *((other, True) for other in denied)]:
        for cls in classes:
            key = canonical(cls, candidate)
            parts = key.split(".")
            if key in known and (known[key].is_switch or not negated):
                return key, known[key], negated
            for end in range(1, len(parts)):
                holder = known.get(".".join(parts[:end]))
                if holder is not None and holder.is_table and not negated:
                    return key, dataclasses.replace(holder, kind="a value"), False
    return name, None, False


def _owner(name: str, classes: tuple[type, ...]) -> type:
    """The class whose keys an unknown flag resembles; the last one, the recipe's, if none."""
    key = name.replace("-", "_")
    for cls in classes:
        keys = [item.key for item in fields_help(cls)]
        if difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
            return cls
    return classes[-1]


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False

"""Configs are frozen dataclasses: read from TOML, changed by flags, written back; source: none.

Nothing passes unnoticed: an unknown key, and a value of another type, end in a UniRLError that says
what was found and what was expected.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from unirl.core.errors import UniRLError

T = TypeVar("T")

_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}


class Text(str):
    """A value as typed behind a flag: its field's type parses it. TOML brings types of its own."""

    __slots__ = ()


@dataclass(frozen=True)
class FieldHelp:
    """One key of a config, for help texts and for parsing flags."""

    key: str
    """Dotted, as in queue.max_staleness."""
    kind: str
    """The type in words."""
    default: str
    """As TOML would have it; empty when the key is required."""
    doc: str
    """The docstring under the field."""
    is_switch: bool
    """True or false: as a flag it needs no value."""
    is_table: bool
    """A dictionary: dotted keys may go on below it."""


# ----------------------------------------------------------------------------------------- reading


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UniRLError, with the line, when it is missing or wrong."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        near = suggestion(path.name, [p.name for p in path.parent.glob("*.toml")])
        raise UniRLError(
            f'config file "{path}" does not exist',
            f'there is no such file in "{path.parent}"',
            near or "check the path; shipped configs: unirl list configs",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UniRLError(
            f'config file "{path}" is not TOML',
            str(error),
            'mind the quotes around strings: id = "CartPole-v1"',
        ) from None
    except OSError as error:
        raise UniRLError(
            f'config file "{path}" cannot be read',
            f"the system says: {error.strerror}",
            "check the path and its permissions",
        ) from None


def from_mapping(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """The config that nested tables describe; keys that are absent keep their defaults.

    Raises UniRLError for a key that is unknown or missing, and for a value of another type. The
    classes' own rules (`__post_init__`) apply once, to the finished tables.
    """
    check_keys(cls, mapping)
    return _build(cls, mapping, "")


def override(config: T, changes: Mapping[str, Any]) -> T:
    """A copy with some keys changed: {"run.total_steps": 1e6} or {"run": {"total_steps": 1e6}}.

    Hyphens in keys count as underscores. A string is parsed by its field's type: "1e6", "none".
    """
    cls = type(config)
    changes = {key: _as_text(value) for key, value in changes.items()}
    return from_mapping(cls, merge(to_mapping(config), nest(cls, changes)))


def nest(cls: type, dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables, hyphens of field names turned into underscores."""
    root: dict[str, Any] = {}
    for key, value in dotted.items():
        *parents, last = canonical(cls, key).split(".")
        table = root
        for parent in parents:
            child = table.setdefault(parent, {})
            if not isinstance(child, dict):
                raise UniRLError(
                    f"{key} is set, and so is {parent}",
                    "the second holds the first",
                    "set one of them",
                )
            table = child
        if isinstance(value, Mapping):
            kind = _dataclass_in(_kind_at(cls, canonical(cls, key)))
            inner = nest(kind, value) if kind is not None else dict(value)
            held = table.get(last)
            value = merge(held, inner) if isinstance(held, dict) else inner
        table[last] = value
    return root


def canonical(cls: type, key: str) -> str:
    """A dotted key with underscores in the names of fields; keys inside a dictionary stay."""
    parts = key.split(".")
    at: Any = cls
    for index, part in enumerate(parts):
        if not dataclasses.is_dataclass(at):
            break
        parts[index] = part.replace("-", "_")
        at = _kind_at(typing.cast(type, at), parts[index])
    return ".".join(parts)


def merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """One nested table out of several; where two set a key, the later one wins."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            held = merged.get(key)
            if isinstance(value, Mapping):
                value = merge(held if isinstance(held, dict) else {}, value)
            merged[key] = value
    return merged


def check_keys(cls: type, mapping: Mapping[str, Any], source: str = "") -> None:
    """Raise UniRLError, naming `source`, when a nested table has a key that the config has not."""

    def visit(kind: Any, table: Mapping[str, Any], prefix: str) -> None:
        hints = _hints(kind)
        for name, value in table.items():
            if name not in hints:
                raise unknown_key(cls, f"{prefix}{name}", source)
            inner = _dataclass_in(hints[name])
            if inner is not None and isinstance(value, Mapping):
                visit(inner, value, f"{prefix}{name}.")

    visit(cls, mapping, "")


def unknown_key(cls: type, key: str, source: str = "", flag: bool = False) -> UniRLError:
    """The error for a key that a config has not, with the keys it has there and the nearest one."""
    known = [item.key for item in fields_help(cls)]
    table, _, leaf = key.rpartition(".")
    near = [name for name in known if name.rpartition(".")[2] == leaf.replace("-", "_")]
    near = near or difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    show = flag_of if flag else str
    here = [name for name in known if name.rpartition(".")[0] == table]
    if here:
        rule = "there are " + ", ".join(show(name) for name in here)
    else:
        tables = dict.fromkeys(name.partition(".")[0] for name in known)
        rule = "the tables are " + ", ".join(tables)
    what = f"flag {flag_of(key)} is unknown" if flag else f'config key "{key}" is unknown'
    remedy = "--help explains them" if flag else "correct its name, or remove it"
    return UniRLError(
        what + (f" ({source})" if source else ""),
        rule,
        f"did you mean {' or '.join(show(name) for name in near[:2])}?" if near else remedy,
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """'did you mean "..."?' for the nearest known word, or nothing."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'did you mean "{by_lower[near[0]]}"?' if near else ""


def _build(cls: type[T], mapping: Mapping[str, Any], prefix: str) -> T:
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for item in _fields(cls):
        path, hint, default = prefix + item.name, hints[item.name], _default(item)
        inner = _dataclass_in(hint)
        value = mapping.get(item.name, MISSING)
        if inner is not None and (
            isinstance(value, Mapping) or (value is MISSING and default is MISSING)
        ):
            # A parent's default may differ from its class's: a partial table changes the former.
            start = to_mapping(default) if isinstance(default, inner) else {}
            given = {} if value is MISSING else value
            values[item.name] = _build(inner, merge(start, given), path + ".")
        elif value is not MISSING:
            values[item.name] = _checked(value, hint, path, default)
        elif default is not MISSING:
            values[item.name] = default
        else:
            raise UniRLError(
                f"{path} is missing",
                f"it has no default; {_describe(hint)} is expected",
                f"set {flag_of(path)}, or {item.name} under [{prefix[:-1]}] in the config file"
                if prefix
                else f"set {flag_of(path)}",
            )
    return cls(**values)


# ----------------------------------------------------------------------------------------- writing


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as nested dictionaries; None stays None, tuples stay tuples."""
    return {item.name: _plain(getattr(config, item.name)) for item in _fields(type(config))}


def to_toml(config: Any, **top: str) -> str:
    """The config as TOML that `from_mapping` reads back to an equal one.

    top: keys above the tables, such as recipe="impala"; a reader takes them out first.
    None is left out where it is the default, and written as "none" where it is not.
    """
    lines = [f"{key} = {_toml(value)}" for key, value in top.items()]
    _write_table(config, _defaults(type(config)), "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(config: Any, defaults: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    tables: list[tuple[str, Any, Any]] = []
    for item in _fields(type(config)):
        value, default = getattr(config, item.name), defaults.get(item.name, MISSING)
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            tables.append((item.name, value, default))
        elif value is not None:
            lines.append(f"{item.name} = {_toml(value)}")
        elif default is not None:
            lines.append(f'{item.name} = "none"')
    for name, value, default in tables:
        if isinstance(value, Mapping):
            _write_mapping(value, prefix + name, default, lines)
            continue
        lines += ["", f"[{prefix}{name}]"]
        kind = type(value)
        _write_table(value, _defaults(kind, default), f"{prefix}{name}.", lines)


def _write_mapping(value: Mapping[str, Any], path: str, default: Any, lines: list[str]) -> None:
    if not value and not default:
        return
    lines += ["", f"[{path}]"]
    for key, child in value.items():
        if not isinstance(child, Mapping):
            lines.append(f"{_toml_key(key)} = {_toml(child, path)}")
    for key, child in value.items():
        if isinstance(child, Mapping):
            _write_mapping(child, f"{path}.{_toml_key(key)}", {"": 0}, lines)


def _toml(value: Any, path: str = "") -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v, path)}" for k, v in value.items()) + "}"
    raise UniRLError(
        f"{path or 'a value'} holds {value!r}",
        f"TOML has numbers, strings, booleans, lists and tables, but no {type(value).__name__}",
        "leave the key out, or give it one of these",
    )


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "a").replace("_", "a").isalnum()
    return key if bare else _toml(key)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    return value


# ------------------------------------------------------------------------------------------- flags


def parse_flags(
    arguments: Sequence[str], cls: type, *others: type, short: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, Text]]:
    """Split a command line into positional arguments and flags by dotted key of the given configs.

    --a.b value, --a.b=value; for true or false also --a.b and --no-a.b; `--` ends the flags.
    short: {"-o": "out"}. Of a flag given twice, the last one counts.
    Raises UniRLError for a flag that no config knows and for one without its value.
    """
    known = {item.key: item for kind in (cls, *others) for item in fields_help(kind)}
    positional: list[str] = []
    flags: dict[str, Text] = {}
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if argument == "--":
            positional += reversed(waiting)
            break
        if short and argument in short:
            argument = "--" + short[argument]
        if not argument.startswith("--"):
            if argument.startswith("-") and len(argument) > 1 and not _is_number(argument):
                raise UniRLError(
                    f"flag {argument} is unknown",
                    "flags begin with two hyphens"
                    + (f", besides {', '.join(short)}" if short else ""),
                    "--help explains them",
                )
            positional.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        key, item, negated = _find_flag(name, known, (cls, *others))
        if item is None:
            raise unknown_key(_owner(name, (cls, *others)), name, flag=True)
        if not equals and item.is_switch:
            typed = waiting and waiting[-1].lower() in _WORDS and not negated
            value = waiting.pop() if typed else "true"
        elif not equals:
            if not waiting or waiting[-1].startswith("--") or (short and waiting[-1] in short):
                raise UniRLError(
                    f"flag {flag_of(key)} has no value", f"it takes {item.kind}", _example(item)
                )
            value = waiting.pop()
        if negated:
            value = "false" if _WORDS.get(value.lower(), True) else "true"
        flags[key] = Text(value)
    return positional, flags


def flag_of(key: str) -> str:
    """The flag that sets a dotted key."""
    return "--" + key.replace("_", "-")


def fields_help(cls: type) -> list[FieldHelp]:
    """Every key of a config with type, default and docstring; tables after plain keys."""
    return list(_help(cls, _defaults(cls), ""))


def _help(cls: type, defaults: Mapping[str, Any], prefix: str) -> Iterable[FieldHelp]:
    hints, docs = _hints(cls), _docs(cls)
    inner: list[tuple[str, type, Any]] = []
    for item in _fields(cls):
        hint, default = hints[item.name], defaults.get(item.name, MISSING)
        kind = _dataclass_in(hint)
        if kind is not None:
            inner.append((item.name, kind, default))
            continue
        shown = "" if default is MISSING else _default_text(default)
        members = _members(hint)
        yield FieldHelp(
            prefix + item.name, _describe(hint), shown, docs.get(item.name, ""),
            is_switch=bool in members,
            is_table=any(_is_mapping(member) for member in members),
        )  # fmt: skip
    for name, kind, default in inner:
        yield from _help(kind, _defaults(kind, default), f"{prefix}{name}.")


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
        if difflib.get_close_matches(
            key, [item.key for item in fields_help(cls)], n=1, cutoff=0.75
        ):
            return cls
    return classes[-1]


def _example(item: FieldHelp) -> str:
    value = item.default.strip('"') or "VALUE"
    return f"write {flag_of(item.key)} {value}"


def _default_text(value: Any) -> str:
    return "none" if value is None else _toml(_plain(value))


# ------------------------------------------------------------------------------------------- types


class _Misfit(Exception):
    """A value does not fit a type."""


def _checked(value: Any, hint: Any, path: str, default: Any) -> Any:
    try:
        return _fit(value, hint)
    except _Misfit:
        pass
    flag = isinstance(value, Text)
    raise UniRLError(
        f"flag {flag_of(path)} is {_shown(value)}" if flag else f"{path} is {_shown(value)}",
        f"expected {_describe(hint)}, found {_found(value)}",
        _remedy(value, hint, path, default),
    )


def _remedy(value: Any, hint: Any, path: str, default: Any) -> str:
    literals = [member for member in _members(hint) if get_origin(member) is Literal]
    choices = [str(choice) for member in literals for choice in get_args(member)]
    near = suggestion(value, choices) if isinstance(value, str) else ""
    inner = _dataclass_in(hint)
    if near:
        return near
    if inner is not None:
        return f"set the keys below it, such as {path}.{_fields(inner)[0].name}"
    if default is not MISSING:
        return f"the default is {_default_text(default)}"
    return f"give it {_describe(hint)}"


def _fit(value: Any, hint: Any) -> Any:
    """The value as the type wants it, or _Misfit. A Text is parsed; all else must fit as it is."""
    members = _members(hint)
    if types.NoneType in members and (
        value is None or (isinstance(value, str) and value.lower() == "none")
    ):
        return None
    # Text fits every str, so a str member is asked last.
    for member in sorted(members, key=lambda m: m is str):
        try:
            return _fit_one(value, member)
        except _Misfit:
            continue
    raise _Misfit


def _fit_one(value: Any, hint: Any) -> Any:
    text = isinstance(value, Text)
    origin = get_origin(hint) or hint
    if origin is Literal:
        for choice in get_args(hint):
            if (text and value == str(choice)) or (type(value) is type(choice) and value == choice):
                return choice
        raise _Misfit
    if hint in (bool, int, float):
        return _fit_number(value, hint)
    if hint is str and isinstance(value, str):
        return str(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if origin in (tuple, list):
        return _fit_sequence(value, origin, get_args(hint))
    if _is_mapping(hint):
        return _fit_mapping(value, get_args(hint))
    if hint is Any or hint is object:
        return _literal(value) if text else value
    if isinstance(hint, type) and isinstance(value, hint) and not text:
        return value
    raise _Misfit


def _fit_number(value: Any, hint: type) -> bool | int | float:
    if isinstance(value, Text):
        if hint is bool:
            if value.lower() not in _WORDS:
                raise _Misfit
            return _WORDS[value.lower()]
        try:
            # int first: a float would round what is above 2**53.
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise _Misfit from None
    if isinstance(value, bool) or hint is bool:
        if hint is bool and isinstance(value, bool):
            return value
        raise _Misfit
    if not isinstance(value, int | float) or math.isnan(value):
        raise _Misfit
    if hint is float:
        return float(value)
    if isinstance(value, float) and not value.is_integer():
        raise _Misfit
    return int(value)


def _fit_sequence(value: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, Text):
        stripped = value.strip()
        if stripped.startswith("["):
            value = _literal(Text(stripped))
        else:
            parts = stripped.strip("()").split(",")
            value = [Text(part.strip()) for part in parts if part.strip()]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _Misfit
    if origin is list or arguments[-1:] == (Ellipsis,):
        kinds = [arguments[0] if arguments else Any] * len(value)
    else:
        kinds = list(arguments)
    if len(kinds) != len(value):
        raise _Misfit
    return origin(_fit(item, kind) for item, kind in zip(value, kinds, strict=True))


def _fit_mapping(value: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    if isinstance(value, Text):
        value = _literal(value)
    if not isinstance(value, Mapping):
        raise _Misfit
    kind = arguments[1] if arguments else Any
    return {str(key): _fit(child, kind) for key, child in value.items()}


def _literal(text: Text) -> Any:
    """JSON where it is JSON, else the words themselves."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, str(text))


def _as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_text(child) for key, child in value.items()}
    return Text(value) if isinstance(value, str) else value


def _describe(hint: Any) -> str:
    parts = []
    for member in _members(hint):
        origin = get_origin(member) or member
        if origin is Literal:
            parts += [_shown(choice) for choice in get_args(member)]
        elif origin in (tuple, list):
            inner = [argument for argument in get_args(member) if argument is not Ellipsis]
            plain = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}
            word = plain.get(inner[0], "values") if inner and len(set(inner)) == 1 else "values"
            fixed = origin is tuple and Ellipsis not in get_args(member)
            parts.append(f"a list of {len(inner)} {word}" if fixed else f"a list of {word}")
        elif _is_mapping(member) or dataclasses.is_dataclass(member):
            parts.append("a table")
        else:
            names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
            names |= {types.NoneType: '"none"', Path: "a path", Any: "a value"}
            parts.append(names.get(member, getattr(member, "__name__", str(member))))
    return " or ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def _found(value: Any) -> str:
    if isinstance(value, Text):
        return "other text"
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number that is not whole" if not math.isnan(value) else "not a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, Sequence) else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    text = json.dumps(str(value), ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _dataclass_in(hint: Any) -> type | None:
    for member in _members(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def _kind_at(cls: type, path: str) -> Any:
    """The type at a dotted path: a dataclass where the field holds one, None without a field."""
    at: Any = cls
    for name in path.split("."):
        if not dataclasses.is_dataclass(at):
            return None
        hint = _hints(at).get(name)
        at = _dataclass_in(hint) or hint
    return at


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(cls) if item.init]


def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in _fields(cls)}


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _defaults(cls: type, instance: Any = None) -> dict[str, Any]:
    """Defaults by name: those of `instance` when there is one, else the class's (or MISSING)."""
    if isinstance(instance, cls):
        return {item.name: getattr(instance, item.name) for item in _fields(cls)}
    return {item.name: _default(item) for item in _fields(cls)}


def _docs(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a class and its parents, where the source is at hand."""
    docs: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(parent):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for item, below in itertools.pairwise(body):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[item.target.id] = inspect.cleandoc(below.value.value)
    return docs


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

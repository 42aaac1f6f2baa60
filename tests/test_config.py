"""Configs: what is written is read back, what is unknown or of another type never passes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl import config as configs
from unirl import registry
from unirl.cli import main
from unirl.config.spelling import RENAMED
from unirl.errors import UniRLError


@dataclass(frozen=True)
class Optimizer:
    """Steps."""

    name: Literal["adam", "rmsprop"] = "adam"
    """Which one."""
    lr: float = 6e-4
    """Size of a step. More: faster, less stable."""
    max_norm: float | None = None
    """Longest gradient."""
    nesterov: bool = False
    """Look ahead."""


@dataclass(frozen=True)
class Queue:
    """Slots."""

    window: int | None = 1
    """How far samples overtake."""
    batch_size: int = 1
    """Samples per update."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UniRLError(
                f"queue.batch_size is {self.batch_size}", "it must be >= 1", "raise it"
            )


@dataclass(frozen=True)
class Env:
    """World."""

    id: str
    """Its name."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths."""
    span: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    folder: Path | None = None
    """Where."""


@dataclass(frozen=True)
class Config:
    """All."""

    env: Env
    optimizer: Optimizer = field(default_factory=Optimizer)
    queue: Queue = field(default_factory=lambda: Queue(window=4))
    steps: int = 10
    """How long."""


def make(**tables: Any) -> Config:
    return configs.from_mapping(Config, {"env": {"id": "a"}, **tables})


def three_parts(error: pytest.ExceptionInfo[UniRLError]) -> str:
    assert len(error.value.parts) == 3, error.value.parts
    return " | ".join(error.value.parts)


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
leaf = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), names)
values = st.recursive(
    leaf, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3), max_leaves=8
)


@given(
    env=st.builds(
        Env,
        id=names,
        hidden=st.lists(st.integers(1, 9)).map(tuple),
        kwargs=st.dictionaries(names, values, max_size=4),
        folder=st.none() | st.just(Path("a/b")),
    ),
    optimizer=st.builds(
        Optimizer,
        lr=st.floats(allow_nan=False, allow_infinity=False),
        max_norm=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        nesterov=st.booleans(),
    ),
    window=st.none() | st.integers(1, 9),
)
def test_what_is_written_is_read_back(env: Env, optimizer: Optimizer, window: int | None) -> None:
    config = Config(env, optimizer, Queue(window=window))
    text = configs.to_toml(config, recipe="impala")
    tables = tomllib.loads(text)
    assert tables.pop("recipe") == "impala"
    assert configs.from_mapping(Config, tables) == config


def test_none_is_written_only_where_it_is_not_the_default() -> None:
    text = configs.to_toml(configs.override(make(), {"queue.window": None}))
    assert 'window = "none"' in text
    assert "max_norm" not in text


def test_a_partial_table_keeps_the_defaults_of_the_parent() -> None:
    assert make(queue={"batch_size": 2}).queue == Queue(window=4, batch_size=2)


def test_the_rules_of_a_class_see_only_the_finished_tables() -> None:
    impossible, possible = {"queue": {"batch_size": 0}}, {"queue": {"batch_size": 2}}
    assert make(**configs.merge(impossible, possible)).queue.batch_size == 2
    with pytest.raises(UniRLError, match="batch_size is 0"):
        make(**impossible)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "1e6", 1_000_000),
        ("steps", "1_000", 1000),
        ("steps", "9007199254740993", 2**53 + 1),
        ("optimizer.lr", "3e-4", 3e-4),
        ("optimizer.lr", "-1", -1.0),
        ("optimizer.max-norm", "none", None),
        ("optimizer.max_norm", "0.5", 0.5),
        ("optimizer.name", "rmsprop", "rmsprop"),
        ("optimizer.nesterov", "true", True),
        ("env.hidden", "32,16", (32, 16)),
        ("env.hidden", "[32, 16]", (32, 16)),
        ("env.hidden", "", ()),
        ("env.span", "-1,1", (-1.0, 1.0)),
        ("env.kwargs", '{"a": [1, "b"]}', {"a": [1, "b"]}),
        ("env.kwargs.my-key", "3", {"my-key": 3}),
        ("env.kwargs.a.b", "x", {"a": {"b": "x"}}),
        ("env.id", "7", "7"),
        ("env.folder", "a/b", Path("a/b")),
    ],
)
def test_text_is_parsed_by_the_type_of_its_field(key: str, text: str, value: Any) -> None:
    config: Any = configs.override(make(), {key: text})
    path = key.split(".")
    for name in path[: 2 if "kwargs" in key else None]:
        config = getattr(config, name.replace("-", "_"))
    assert config == value and type(config) is type(value)


def test_changes_may_be_nested_or_dotted() -> None:
    dotted = configs.override(make(), {"optimizer.lr": 1e-3, "steps": 5})
    assert dotted == configs.override(make(), {"optimizer": {"lr": "1e-3"}, "steps": 5.0})
    assert dotted.optimizer.lr == 1e-3 and dotted.steps == 5


@dataclass(frozen=True)
class Tables:
    """Dictionaries of anything, and of numbers."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def test_a_string_within_a_table_of_anything_stays_one() -> None:
    changed = configs.override(Tables(), {"kwargs": {"level": "1", "on": "true"}})
    assert changed.kwargs == {"level": "1", "on": "true"}


def test_an_error_in_a_program_names_the_key_and_not_a_flag() -> None:
    with pytest.raises(UniRLError, match=r'^weights\.math is "abc"'):
        configs.override(Tables(), {"weights.math": "abc"})


def test_a_string_among_numbers_is_parsed() -> None:
    assert configs.override(Tables(), {"weights": {"math": "1e-1"}}).weights == {"math": 0.1}


@pytest.mark.parametrize(
    "changes", [{"weights.math": "abc"}, {"weights": {"code": 1, "math": "abc"}}]
)
def test_of_a_table_the_wrong_value_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UniRLError, match=r'weights\.math is "abc"\. expected a number') as caught:
        configs.override(Tables(), changes)
    assert len(caught.value.parts) == 3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", 1.5, "an integer"),
        ("steps", True, "an integer"),
        ("steps", "1e6", "an integer"),
        ("optimizer.lr", "fast", "a number"),
        ("optimizer.lr", float("nan"), "a number"),
        ("optimizer.nesterov", 1, "true or false"),
        ("optimizer.name", "adan", 'did you mean "adam"?'),
        ("env.id", 7, "a string"),
        ("env.hidden", 64, "a list of integers"),
        ("env.hidden", ["a"], "a list of integers"),
        ("env.span", [1.0], "a list of 2 numbers"),
        ("env.kwargs", 3, "a table"),
        ("optimizer", 3, "a table"),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: Any, expected: str) -> None:
    # As a TOML file would have it: strings are strings here, not text to be parsed.
    tables = configs.merge({"env": {"id": "a"}}, configs.nest(Config, {key: value}))
    with pytest.raises(UniRLError) as error:
        configs.from_mapping(Config, tables)
    message = three_parts(error)
    assert key in message and expected in message


@dataclass(frozen=True)
class Limits:
    soft: float = 1.0
    hard: float = field(default=1.0, metadata={"infinite": True})
    shares: Mapping[str, float] = field(default_factory=dict)
    span: tuple[float, float] = (0.0, 1.0)
    anything: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limited:
    limits: Limits = Limits()


def test_a_number_is_finite_unless_its_field_says_otherwise() -> None:
    allowed = {"limits.hard": "inf", "limits.anything": {"x": float("inf")}}
    config = configs.override(Limited(), allowed)
    assert config.limits.hard == float("inf")
    assert configs.from_mapping(Limited, tomllib.loads(configs.to_toml(config))) == config
    for key, value in (
        ("limits.soft", "inf"),
        ("limits.soft", "-inf"),
        ("limits.shares", {"a": "inf"}),
        ("limits.span", "[0, 1e999]"),
    ):
        with pytest.raises(UniRLError) as error:
            configs.override(Limited(), {key: value})
        assert "it must be a finite number" in three_parts(error)
    for key in ("limits.soft", "limits.hard"):
        with pytest.raises(UniRLError, match="nan"):
            configs.override(Limited(), {key: "nan"})


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("queue.batchsize", "queue.batch_size"),
        ("lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("step", "steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, near: str) -> None:
    with pytest.raises(UniRLError) as error:
        configs.override(make(), {key: 1})
    assert f"did you mean {near}?" in three_parts(error)


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"queue.reach_ahead": "queue.window", "sgd.step": "optimizer.lr"}
    monkeypatch.setattr("unirl.config.spelling.RENAMED", names)


@pytest.mark.usefixtures("renamed")
def test_a_renamed_key_is_refused_with_its_new_name() -> None:
    with pytest.raises(UniRLError) as error:
        configs.check_keys(Config, {"queue": {"reach_ahead": 1}}, "in old.toml")
    assert 'key "queue.reach_ahead" is unknown (in old.toml)' in three_parts(error)
    assert "it was renamed to queue.window" in three_parts(error)
    with pytest.raises(UniRLError, match=r"flag --sgd\.step is unknown.*to --optimizer\.lr"):
        configs.parse_flags(["--sgd.step", "1"], Config)


@pytest.mark.usefixtures("renamed")
def test_the_command_line_says_what_a_key_was_renamed_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[queue]\nreach_ahead = 1\n")
    for words in (["--queue.reach-ahead", "1"], [f"@{file}"]):
        assert main(["train", "impala", "--env.id", "CartPole-v1", *words, "--dry-run"]) == 2
        assert "was renamed to" in capsys.readouterr().err


def test_every_renamed_key_has_a_new_name_that_exists() -> None:
    known = set()
    for name in registry.RECIPES:
        known |= {item.key for item in configs.fields_help(registry.recipe(name).Config)}
    assert not set(RENAMED) & known
    assert set(RENAMED.values()) <= known


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UniRLError) as error:
        configs.from_mapping(Config, {})
    assert "env.id is missing" in three_parts(error)


def test_flags_are_split_from_arguments() -> None:
    positional, flags = configs.parse_flags(
        ["a", "--env.id=x", "--optimizer.lr", "-1e-3", "--optimizer.nesterov", "b", "--", "--c"],
        Config,
    )
    assert positional == ["a", "b", "--c"]
    assert flags == {"env.id": "x", "optimizer.lr": "-1e-3", "optimizer.nesterov": "true"}


@pytest.mark.parametrize(
    "words",
    [
        ["--no-optimizer.nesterov"],
        ["--optimizer.no-nesterov"],
        ["--optimizer.nesterov=false"],
        ["--optimizer.nesterov", "off"],
    ],
)
def test_a_switch_can_be_turned_off(words: list[str]) -> None:
    _, flags = configs.parse_flags(words, Config)
    before = make(optimizer={"nesterov": True})
    assert configs.override(before, flags).optimizer.nesterov is False


@pytest.mark.parametrize("words", [["--steps"], ["--steps", "--env.id", "a"]])
def test_a_flag_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(UniRLError) as error:
        configs.parse_flags(words, Config)
    assert "--steps has no value" in three_parts(error)


def test_help_has_type_default_and_docstring_of_every_key() -> None:
    by_key = {item.key: item for item in configs.fields_help(Config)}
    assert next(iter(by_key)) == "steps" and "env.kwargs" in by_key and len(by_key) == 12
    lr = by_key["optimizer.lr"]
    assert (lr.kind, lr.default) == ("a number", "0.0006")
    assert lr.doc == "Size of a step. More: faster, less stable."
    assert by_key["queue.window"].default == "4"
    assert by_key["env.id"].default == ""


@pytest.mark.parametrize("text", ["a = ", "a = 1\na = 2", "\x00"])
def test_a_malformed_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UniRLError) as error:
        configs.load_toml(path)
    assert "bad.toml" in three_parts(error)


def test_a_missing_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "pong.toml").write_text("")
    with pytest.raises(UniRLError) as error:
        configs.load_toml(tmp_path / "pnog.toml")
    assert 'did you mean "pong.toml"?' in three_parts(error)


@dataclass(frozen=True)
class Choice:
    """A field of which none is both a choice and, left out, no choice at all."""

    mode: Literal["none", "some"] | None = None
    """What."""
    size: int | None = 3
    """How large."""


def test_a_choice_that_is_called_none_can_be_chosen() -> None:
    assert configs.from_mapping(Choice, {"mode": "none", "size": "none"}) == Choice("none", None)
    assert configs.from_mapping(Choice, {}).mode is None
    tables = tomllib.loads(configs.to_toml(Choice("none"), recipe="impala"))
    assert tables.pop("recipe") == "impala"
    assert configs.from_mapping(Choice, tables) == Choice("none")

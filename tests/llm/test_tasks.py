from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from unirl.errors import UniRLError
from unirl.llm.tasks.builtin import BUILT_IN, CHARACTERS
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.make import make_tasks
from unirl.llm.tasks.task import Example, Examples, Task


def task(name: str, **settings: object) -> Task:
    return make_tasks(TaskConfig(name=name, **settings))[0]  # type: ignore[arg-type]


def listed(examples: Examples) -> list[Example]:
    return [examples[i] for i in range(len(examples))]


def asked(example: Example) -> str:
    return example.text or str([dict(turn) for turn in example.messages])


def write_jsonl(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return f"jsonl:{path}"


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_splits_are_disjoint_complete_and_the_same_every_time(name: str) -> None:
    first, again = task(name), task(name, seed=7)
    assert listed(first.train) == listed(again.train)
    assert listed(first.held_out) == listed(again.held_out)
    train = {asked(example) for example in listed(first.train)}
    held_out = {asked(example) for example in listed(first.held_out)}
    assert not train & held_out
    assert len(train) == len(first.train) and len(held_out) == len(first.held_out) > 0


def test_digits_has_150_questions_to_train_on_and_50_held_out() -> None:
    digits = task("digits")
    assert (len(digits.train), len(digits.held_out)) == (150, 50)
    for example in listed(digits.train) + listed(digits.held_out):
        text = example.messages[0]["content"].removeprefix("What is ").removesuffix("?")
        assert str(eval(text)) == example.answer
    # Both kinds of question are held out.
    assert {"+", "*"} <= set("".join(asked(example) for example in listed(digits.held_out)))


def test_reverse_copy_and_count_are_right_and_need_few_characters() -> None:
    for name in ("reverse", "copy", "count"):
        made = task(name, options={"digits": "3"})
        assert len(made.train) + len(made.held_out) == 1000
        for example in listed(made.held_out):
            digits, sign = example.text[:-2].split(), example.text[-1]
            right = {"=": digits[::-1], ":": digits, "#": [str(digits.count(digits[0]))]}[sign]
            assert example.answer == "".join(right)
            assert set(example.text + example.answer) <= set(CHARACTERS)


def test_many_digits_are_spread_over_all_their_strings() -> None:
    texts = [example.text for example in listed(task("reverse", options={"digits": "9"}).held_out)]
    assert len({text[0] for text in texts}) == 10


def test_counts_are_as_asked_for() -> None:
    made = task("arithmetic", num_train=30, num_eval=20)
    assert (len(made.train), len(made.held_out)) == (30, 20)
    assert len(task("arithmetic", num_eval=0).held_out) == 0


def test_jsonl_gives_its_fields(tmp_path: Path) -> None:
    rows: list[object] = [{"q": f"{i}?", "a": i, "level": i % 3} for i in range(40)]
    name = write_jsonl(tmp_path / "data.jsonl", rows)
    made = task(name, prompt_field="q", answer_field="a")
    assert (len(made.train), len(made.held_out)) == (36, 4)
    for example in listed(made.train) + listed(made.held_out):
        assert example.messages[0]["content"] == f"{example.answer}?"
        assert example.info == {"level": int(example.answer) % 3}


def test_jsonl_takes_messages_and_a_file_to_hold_out(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    name = write_jsonl(tmp_path / "train.jsonl", [{"prompt": turns, "answer": "Hello"}])
    other = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "Ho", "answer": "Hey"}])
    made = task(name, options={"eval": other.removeprefix("jsonl:")})
    assert [dict(turn) for turn in made.train[0].messages] == turns
    assert made.held_out[0].answer == "Hey"


def test_parquet_and_datasets_give_the_same_as_jsonl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    datasets = pytest.importorskip("datasets", reason="hf: is read by datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": f"{i}?", "answer": str(i), "level": i % 3} for i in range(30)]
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    lines = task(write_jsonl(tmp_path / "rows.jsonl", list(rows)))
    table = task(f"parquet:{folder / 'train.parquet'}")
    loaded = task(f"hf:{folder}")
    assert listed(lines.train) == listed(table.train) == listed(loaded.train)
    assert listed(lines.held_out) == listed(table.held_out) == listed(loaded.held_out)


def test_gym_puzzles_are_the_same_every_time_and_never_in_both_splits() -> None:
    pytest.importorskip("reasoning_gym", reason="makes the puzzles")
    settings = {"max_terms": "2", "max_digits": "1"}
    made, again = (task("gym:chain_sum", num_train=200, options=settings) for _ in range(2))
    assert made.reward == "gym"
    assert listed(made.train) == listed(again.train)
    held_out = {asked(example) for example in listed(made.held_out)}
    assert len(made.held_out) == 20 and held_out
    # One-digit sums of two terms are few: some were to be in both.
    assert 0 < len(made.train) < 200
    assert not held_out & {asked(example) for example in listed(made.train)}


def test_a_task_may_be_a_function_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_riddles.py").write_text(
        "from unirl.llm.tasks.task import Task, question\n"
        "def riddles(config):\n"
        "    return Task('riddles', [question('Why?', 'Because.')], [], 'exact')\n"
        "def nothing(config):\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert task("my_riddles:riddles").train[0].answer == "Because."
    with pytest.raises(UniRLError, match="returns a Task, found int"):
        task("my_riddles:nothing")
    with pytest.raises(UniRLError, match='did you mean "riddles"'):
        task("my_riddles:ridles")
    with pytest.raises(UniRLError, match='no module "no_such_tasks"'):
        task("no_such_tasks:riddles")


def test_options_may_be_meant_for_one_task_of_a_mix() -> None:
    config = TaskConfig(mix={"reverse": 1, "copy": 1}, options={"reverse/digits": "3"})
    reverse, copy = make_tasks(config)
    assert len(reverse.train[0].text) > len(copy.train[0].text)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"name": "arithmetik"}, 'did you mean "arithmetic"'),
        ({"name": "jsonl:/nowhere/data.jsonl"}, "does not exist"),
        ({"name": "parquet:/nowhere/data.parquet"}, "does not exist"),
        ({"name": "arithmetic", "num_eval": 441}, 'no examples in its split "train"'),
        ({"name": "arithmetic", "num_train": 440}, "440 \\+ 41 > 441"),
        ({"name": "reverse", "options": {"digts": "3"}}, 'did you mean "digits"'),
        ({"name": "reverse", "options": {"digits": "many"}}, "whole number"),
        ({"name": "digits", "options": {"copy/digits": "3"}}, 'there is no task "copy"'),
        ({"max_prompt": 0}, "max_prompt is 0"),
        ({"num_train": 0}, "num_train is 0"),
        ({"num_eval": -1}, "num_eval is -1"),
        ({"mix": {"digits": -1.0}}, "mix.digits is -1"),
        ({"mix": {"digits": 0.0}}, "asks for nothing"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(settings: dict[str, object], what: str) -> None:
    if "parquet" in str(settings):
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    with pytest.raises(UniRLError, match=what) as caught:
        make_tasks(TaskConfig(**settings))  # type: ignore[arg-type]
    assert len(caught.value.parts) == 3


def test_bad_rows_are_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    name = write_jsonl(data, [{"question": "Why?", "answer": "So."}])
    with pytest.raises(UniRLError, match="it has question, answer") as caught:
        task(name)
    assert "prompt_field" in str(caught.value)
    with pytest.raises(UniRLError, match='did you mean "question"'):
        task(name, prompt_field="questions")
    with pytest.raises(UniRLError, match='or to "" if there is none'):
        task(name, prompt_field="question", answer_field="gold")
    with pytest.raises(UniRLError, match="text or a list of messages"):
        task(write_jsonl(data, [{"prompt": 3, "answer": "So."}]))
    with pytest.raises(UniRLError, match=r'did you mean "data\.jsonl"'):
        task(f"jsonl:{tmp_path}/date.jsonl")
    data.write_text('\n{"prompt": "Why?"')
    with pytest.raises(UniRLError, match="line 2 of"):
        task(name)
    data.write_text("\n\n")
    with pytest.raises(UniRLError, match="has no examples"):
        task(name)


def test_puzzles_that_do_not_exist_are_refused() -> None:
    pytest.importorskip("reasoning_gym", reason="makes the puzzles")
    with pytest.raises(UniRLError, match='did you mean "gym:chain_sum"'):
        task("gym:chain_sums")
    with pytest.raises(UniRLError, match='did you mean "max_terms"'):
        task("gym:chain_sum", options={"max_term": "3"})
    with pytest.raises(UniRLError, match="refuses its options"):
        task("gym:chain_sum", options={"max_terms": "-3"})


def test_every_held_out_question_counts_once() -> None:
    counted = Counter(asked(example) for example in listed(task("count").held_out))
    assert set(counted.values()) == {1}

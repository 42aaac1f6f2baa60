from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.errors import UniRLError
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.make import make_tasks
from unirl.llm.tasks.prompt_order import PromptOrder
from unirl.llm.tasks.prompts import PromptSource
from unirl.llm.tasks.task import Example, Task, question


class Characters:
    """A tokenizer that needs no package: a token is a character."""

    chat_template: Any = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(character) for character in text]

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, return_attention_mask: bool
    ) -> dict[str, Any]:
        one = self.encode
        return {"input_ids": [one(text, add_special_tokens=add_special_tokens) for text in texts]}

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        raise AssertionError("there is no template")


class Chatty(Characters):
    """The same with a template, which refuses system turns."""

    chat_template = "yes"

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        assert options.pop("add_generation_prompt") and not options.pop("tokenize")
        if any(turn["role"] == "system" for turn in conversation):
            raise ValueError("no system turns here")
        said = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return said + "<assistant>" + "".join(f"[{name}={options[name]}]" for name in options)


def source(tokenizer: Any | None = None, **settings: Any) -> PromptSource:
    config = TaskConfig(**{"template": "off", **settings})
    return PromptSource(make_tasks(config), tokenizer or Characters(), config)


def of(examples: Sequence[Example], tokenizer: Any, **settings: Any) -> PromptSource:
    config = TaskConfig(name="mine", **settings)
    return PromptSource([Task("mine", examples, [], "exact")], tokenizer, config)


def test_every_example_comes_exactly_once_per_epoch_in_another_order_each() -> None:
    prompts = source(name="digits")
    size = prompts.num_train
    epochs = [[prompts.prompt(epoch * size + i) for i in range(size)] for epoch in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(prompt.index for prompt in epoch) == list(range(size))
        assert {prompt.epoch for prompt in epoch} == {number}
    orders = [tuple(prompt.index for prompt in epoch) for epoch in epochs]
    assert len(set(orders)) == 3


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**62),
    tickets=st.lists(st.integers(0, 20_000), min_size=1, max_size=30),
)
@settings(max_examples=40)
def test_a_ticket_names_the_same_example_whatever_was_asked_before(
    sizes: list[int], seed: int, tickets: list[int]
) -> None:
    names = [f"task {i}" for i in range(len(sizes))]
    weights = [1 / len(sizes)] * len(sizes)

    def fresh() -> PromptOrder:
        return PromptOrder(names, sizes, weights, seed)

    one = fresh()
    forwards = [one.locate(ticket) for ticket in tickets]
    assert forwards == [fresh().locate(ticket) for ticket in tickets]
    assert forwards[::-1] == [one.locate(ticket) for ticket in tickets[::-1]]


@given(seed=st.integers(0, 2**62), weight=st.floats(0.2, 0.8))
@settings(max_examples=10)
def test_each_task_of_a_mix_goes_through_its_examples_epoch_by_epoch(
    seed: int, weight: float
) -> None:
    sizes = [7, 11]
    order = PromptOrder(["a", "b"], sizes, [weight, 1 - weight], seed)
    seen: list[list[tuple[int, int]]] = [[], []]
    for ticket in range(9000):  # across the blocks in which tasks are drawn
        task, index, epoch = order.locate(ticket)
        seen[task].append((epoch, index))
    for task, size in enumerate(sizes):
        for epoch in range(len(seen[task]) // size):
            part = seen[task][epoch * size : (epoch + 1) * size]
            assert sorted(part) == [(epoch, index) for index in range(size)]


def test_tasks_of_a_mix_come_as_often_as_their_weights_say() -> None:
    prompts = source(mix={"digits": 1.0, "arithmetic": 3.0, "copy": 0.0})
    counted = Counter(prompts.prompt(ticket).task for ticket in range(10_000))
    assert set(counted) == {"digits", "arithmetic"}
    # Standard deviation 0.0043.
    assert counted["digits"] / 10_000 == pytest.approx(0.25, abs=0.02)


def test_held_out_prompts_are_those_of_all_tasks_and_none_is_trained_on() -> None:
    prompts = source(mix={"digits": 1.0, "reverse": 1.0})
    assert prompts.num_eval == 60 and prompts.num_train == 240
    held_out = [prompts.held_out(i) for i in range(60)]
    assert [prompt.task for prompt in held_out] == ["digits"] * 50 + ["reverse"] * 10
    assert len({prompt.text for prompt in held_out}) == 60
    trained = {prompts.prompt(ticket).text for ticket in range(2000)}
    assert not trained & {prompt.text for prompt in held_out}
    for i in (-1, 60):
        with pytest.raises(IndexError):
            prompts.held_out(i)


def test_the_seed_changes_the_order_and_not_what_is_held_out() -> None:
    first, other = source(name="digits"), source(name="digits", seed=1)
    orders = [[one.prompt(ticket).text for ticket in range(20)] for one in (first, other)]
    assert orders[0] != orders[1]
    assert [first.held_out(i) for i in range(50)] == [other.held_out(i) for i in range(50)]


def test_orders_are_what_they_were_when_this_was_written() -> None:
    # A run resumed with a newer numpy, torch or UniRL must continue with the same prompts.
    prompts = source(name="digits")
    assert [prompts.prompt(ticket).index for ticket in range(6)] == [15, 7, 106, 134, 116, 44]
    mixed = source(mix={"digits": 1.0, "reverse": 1.0})
    assert [mixed.prompt(ticket).task[0] for ticket in range(12)] == list("ddrdrrddrrdr")


def test_questions_go_through_the_chat_template_and_plain_texts_do_not() -> None:
    chat = source(Chatty(), name="digits", template="auto").prompt(0)
    assert chat.text.startswith("<user>What is ") and chat.text.endswith("?<assistant>")
    assert chat.tokens == tuple(ord(character) for character in chat.text)  # no second start token
    plain = source(Chatty(), name="reverse", template="auto").prompt(0)
    assert plain.text.endswith(" =") and plain.tokens[0] == 1
    forced = source(Chatty(), name="reverse", template="on").prompt(0)
    assert forced.text.endswith(" =<assistant>")
    off = source(Chatty(), name="digits", template="off", system="Be brief.").prompt(0)
    assert off.text.startswith("Be brief.\n\nWhat is ")
    switched = source(
        Chatty(), name="digits", template="auto", template_options={"enable_thinking": False}
    )
    assert switched.prompt(0).text.endswith("[enable_thinking=False]")


def test_transformers_tokenizers_write_the_same_by_text_and_by_tokens() -> None:
    pytest.importorskip("transformers", reason="makes the tokenizer")
    from unirl.llm.models.tiny import tiny_tokenizer

    tokenizer: Any = tiny_tokenizer()
    prompt = source(tokenizer, name="digits", template="auto").prompt(3)
    direct = tokenizer.apply_chat_template(
        [dict(turn) for turn in prompt.messages], add_generation_prompt=True, return_dict=False
    )
    assert list(prompt.tokens) == list(direct)
    assert tokenizer.decode(list(prompt.tokens)).lower() == prompt.text.lower()


def test_longer_prompts_are_refused_or_dropped_and_counted() -> None:
    examples = [question("?" * length, "!") for length in range(1, 21)]
    with pytest.raises(UniRLError, match=r"task\.max_prompt is 11, it has 12 tokens") as caught:
        of(examples, Characters(), template="off", max_prompt=11)
    assert "raise task.max_prompt to 12" in str(caught.value)
    kept = of(examples, Characters(), template="off", max_prompt=11, too_long="drop")
    assert kept.num_train == 10 and kept.dropped == {"mine": 10}
    first_epoch = [kept.prompt(ticket) for ticket in range(10)]
    assert sorted(prompt.index for prompt in first_epoch) == list(range(10))
    assert max(len(prompt.tokens) for prompt in first_epoch) == 11
    with pytest.raises(UniRLError, match='no examples in its split "train"'):
        of(examples, Characters(), template="off", max_prompt=1, too_long="drop")


def test_prompts_leave_room_for_the_completion_in_the_context() -> None:
    config = TaskConfig(name="mine", template="off")
    tasks = [Task("mine", [question("?" * 19, "!")], [], "exact")]
    PromptSource(tasks, Characters(), config, max_context=30, max_tokens=10)
    with pytest.raises(UniRLError, match=r"20 \+ 11 > 30"):
        PromptSource(tasks, Characters(), config, max_context=30, max_tokens=11)


def test_a_tokenizer_without_template_is_refused_where_one_is_needed() -> None:
    with pytest.raises(UniRLError, match="no chat template") as caught:
        source(name="digits", template="auto")
    assert 'task.template to "off"' in str(caught.value) and len(caught.value.parts) == 3
    with pytest.raises(UniRLError, match="no system turns here"):
        source(Chatty(), name="digits", template="auto", system="Be brief.")


def test_prompts_carry_what_rewards_need(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Why?", "answer": "So.", "level": 3}\n')
    prompt = source(name=f"jsonl:{data}", system="Be brief.").prompt(5)
    assert (prompt.answer, dict(prompt.info)) == ("So.", {"level": 3})
    assert [turn["role"] for turn in prompt.messages] == ["system", "user"]
    assert (prompt.index, prompt.epoch, prompt.ticket) == (0, 5, 5)
    with pytest.raises(ValueError, match="ticket is -1"):
        source(name="digits").prompt(-1)

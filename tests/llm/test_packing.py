"""Packs: what is computed, what is predicted, and that each trained token is there once."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.llm.packed_groups import make_groups
from unirl.errors import UniRLError
from unirl.llm.group import Group
from unirl.llm.training.packed_layout import CALL_COST, Row, lay_out
from unirl.llm.training.packing import Pack, pack_groups


def document(pack: Pack, source: int) -> list[int]:
    """All that an input sees, read off the layout alone."""
    begin = 0
    ids = pack.input_ids[0].tolist()
    for block in pack.layout.blocks:
        if source < begin + block.num_tokens:
            offset = source - begin
            cell = offset if block.cell is None else int(block.cell[offset])
            row, column = divmod(cell, block.length)
            own = list(range(source - column, source + 1))
            before: list[int] = []
            if block.prompt is not None and block.of_prompt is not None:
                which = int(block.of_prompt[row])
                before = block.prompt[which].tolist()
                if block.prompt_length is not None:
                    before = before[: int(block.prompt_length[which])]
            return [ids[t] for t in before + own]
        begin += block.num_tokens
    raise AssertionError(f"row {source} is in no block")


def check(groups: list[Group], packs: list[Pack], train: list[Tensor] | None) -> None:
    """Each wanted token is a target once, and sees its prompt and what precedes it."""
    tokens = torch.cat([group.token for group in groups]).long()
    wanted = torch.cat([group.mask for group in groups])
    if train is not None:
        chosen = [
            flags.repeat_interleave(g.lengths) for flags, g in zip(train, groups, strict=True)
        ]
        wanted = wanted & torch.cat(chosen)
    flat = torch.cat([pack.flat for pack in packs]) if packs else torch.zeros(0, dtype=torch.int64)
    assert flat.sort().values.tolist() == wanted.nonzero().flatten().tolist()
    completions = [
        (group, own.tolist())
        for group in groups
        for own in group.token.long().split(group.lengths.tolist())
    ]
    for pack in packs:
        assert torch.equal(tokens[pack.flat], pack.target)
        assert pack.input_ids.numel() == sum(block.num_tokens for block in pack.layout.blocks)
        for i in range(pack.num_targets):
            group, own = completions[int(pack.sequence[i])]
            before = group.prompt.tolist() + own[: int(pack.position[i])]
            assert document(pack, int(pack.source[i])) == before
            assert int(pack.position_ids[0, pack.source[i]]) == len(before) - 1


@st.composite
def batches(draw: Any) -> tuple[list[Group], list[Tensor] | None, int, bool]:
    sizes = draw(
        st.lists(
            st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
            min_size=1,
            max_size=5,
        )
    )
    groups = make_groups(*sizes, seed=draw(st.integers(0, 9)), tools=draw(st.booleans()))
    train = None
    if draw(st.booleans()):
        train = [
            torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
            for n in (group.size for group in groups)
        ]
    return groups, train, draw(st.integers(1, 60)), draw(st.booleans())


@given(batches())
@settings(max_examples=100, deadline=None)
def test_each_trained_token_is_predicted_once_from_its_own_document(
    batch: tuple[list[Group], list[Tensor] | None, int, bool],
) -> None:
    groups, train, budget, share = batch
    packs = pack_groups(groups, budget, train=train, share_prompt=share)
    check(groups, packs, train)
    for pack in packs:
        assert pack.input_ids.numel() <= budget or pack.sequence.unique().numel() == 1


@given(batches(), st.data())
@settings(max_examples=50, deadline=None)
def test_an_end_sees_the_whole_text_of_its_completion(
    batch: tuple[list[Group], list[Tensor] | None, int, bool], data: Any
) -> None:
    groups, train, budget, share = batch
    flags = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes_of(groups)]
    ends = [torch.tensor(one) for one in flags]
    packs = pack_groups(groups, budget, train=train, ends=ends, share_prompt=share)
    check(groups, packs, train)
    trained = {number for pack in packs for number in pack.sequence.tolist()}
    wanted = {i for i, flag in enumerate(torch.cat(ends).tolist()) if flag and i in trained}
    texts = [
        group.prompt.tolist() + own.tolist()
        for group in groups
        for own in group.token.split(group.lengths.tolist())
    ]
    found = [
        (int(number), document(pack, int(end)))
        for pack in packs
        for number, end in zip(pack.end_sequence, pack.end, strict=True)
    ]
    assert sorted(found) == sorted((i, texts[i]) for i in wanted)


def sizes_of(groups: list[Group]) -> list[int]:
    return [group.size for group in groups]


@given(batches(), st.sampled_from([0, 8, 10**9]))
@settings(max_examples=50, deadline=None)
def test_blocks_of_any_size_hold_the_same_documents(
    batch: tuple[list[Group], list[Tensor] | None, int, bool], cost: int
) -> None:
    groups, train, budget, share = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unirl.llm.training.packed_layout.CALL_COST", cost)
        check(groups, pack_groups(groups, budget, train=train, share_prompt=share), train)


def test_a_shared_prompt_is_there_once_and_the_last_token_never() -> None:
    (pack,) = pack_groups(make_groups((5, [3, 3, 3])), 100)
    assert pack.input_ids.numel() == 5 + 3 * 2
    assert pack.source.tolist() == [4, 5, 6, 4, 7, 8, 4, 9, 10]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6]]
    assert all(block.cell is None for block in pack.layout.blocks)
    (alone,) = pack_groups(make_groups((5, [3, 3, 3])), 100, share_prompt=False)
    assert alone.input_ids.numel() == 3 * (5 + 2)


def test_a_group_that_does_not_fit_is_split_and_its_prompt_repeated() -> None:
    packs = pack_groups(make_groups((5, [4, 4, 4])), 11)
    assert [pack.input_ids.numel() for pack in packs] == [11, 8]
    assert [pack.sequence.unique().tolist() for pack in packs] == [[0, 1], [2]]


def test_groups_that_fit_together_share_a_pack() -> None:
    groups = make_groups((2, [3, 3]), (2, [9]), (2, [5]), (2, [3]))
    packs = pack_groups(groups, 16)
    assert [pack.input_ids.numel() for pack in packs] == [16, 10]


def test_a_completion_longer_than_the_budget_has_a_pack_of_its_own() -> None:
    packs = pack_groups(make_groups((3, [20, 2])), 8)
    assert [pack.input_ids.numel() for pack in packs] == [22, 4]


def test_tokens_of_tools_are_inputs_and_no_targets() -> None:
    (group,) = make_groups((2, [5]))
    group.mask[:] = torch.tensor([True, False, False, True, False])
    (pack,) = pack_groups([group], 100)
    assert pack.position.tolist() == [0, 3]
    # The third token predicts the fourth; what comes then is not computed.
    assert pack.input_ids[0].tolist() == [*group.prompt.tolist(), *group.token[:3].tolist()]


def test_nothing_to_train_makes_no_pack() -> None:
    groups = make_groups((2, [3, 0]), (4, [0]))
    assert pack_groups([], 10) == []
    assert pack_groups(groups[1:], 10) == []
    assert pack_groups(groups, 10, train=[torch.tensor([False, True]), torch.tensor([True])]) == []


def test_padding_is_cut_away_where_that_is_worth_a_call() -> None:
    small, large = 8, 512
    rows = [Row(small)] * 40 + [Row(large)] * 40
    layout, order = lay_out(rows)
    assert [(block.num_rows, block.length) for block in layout.blocks] == [(40, large), (40, small)]
    assert order == [*range(40, 80), *range(40)]
    few = [Row(small), Row(small + 1)]
    assert small * (small + 1) < CALL_COST
    assert len(lay_out(few)[0].blocks) == 1


def test_wrong_input_is_refused() -> None:
    groups = make_groups((2, [3]))
    with pytest.raises(UniRLError, match="token budget of 0"):
        pack_groups(groups, 0)
    with pytest.raises(UniRLError, match="one flag for each completion"):
        pack_groups(groups, 10, train=[torch.tensor([True, False])])
    with pytest.raises(UniRLError, match="`ends` has flags of"):
        pack_groups(groups, 10, ends=[torch.tensor([True]), torch.tensor([True])])
    with pytest.raises(UniRLError, match="prompt of group 0 is empty"):
        pack_groups(make_groups((0, [3])), 10)


def test_a_pack_moves_to_a_device_as_a_whole() -> None:
    def devices(thing: Any) -> set[str]:
        if isinstance(thing, Tensor):
            return {thing.device.type}
        if isinstance(thing, tuple):
            return set().union(*map(devices, thing))
        if is_dataclass(thing):
            return set().union(*(devices(value) for value in vars(thing).values()))
        return set()

    (pack,) = pack_groups(make_groups((5, [7, 2]), (3, [4, 4])), 100)
    assert devices(pack) == {"cpu"}
    assert devices(pack.to("meta")) == {"meta"}

"""Groups of completions with a real engine: the versions of their tokens, what becomes of groups
that are interrupted or worthless, and code of the user's own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.llm import rollout_code
from tests.llm.completion_server import CompletionServer
from tests.llm.rollout_code import OBSERVATION
from unirl.core.actor import ActorContext
from unirl.core.queue import QueueServer
from unirl.core.sample import Slot
from unirl.errors import DiscardSlot, ReissueSlot, UniRLError
from unirl.llm.engine import NOBODY
from unirl.llm.group import Group, GroupShape, common_shape, read_group
from unirl.llm.models.model import flat_weights
from unirl.llm.models.tiny import make_tiny, tiny_model
from unirl.llm.outcome import FAILED, SCORE, TIMED_OUT
from unirl.llm.rollout import Rollout
from unirl.llm.training.token_batch import TokenBatch
from unirl.runners.plan import Plan
from unirl.transports.local import LocalTransport, LocalWeightStore
from unirl.transports.table_server import TableServer

SIZES = {"width": 32, "layers": 2}
GROUP, TOKENS = 4, 48
LETTERS = {"reward.weights": {"tests.llm.rollout_code:first_letters": 1.0}}
CONSTANT = {"reward.weights": {"tests.llm.rollout_code:constant": 1.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", **SIZES))


class Bench:
    """A rollout as the recipe makes it, the weights it pulls, and slots for it to fill."""

    def __init__(self, model: str, **overrides: Any) -> None:
        settings: dict[str, Any] = {
            "model.path": model,
            "task.name": "reverse",
            "task.max_prompt": 16,
            "rollout.group_size": GROUP,
            "sampling.max_tokens": TOKENS,
            "mode": "async",
            "queue.max_staleness": 1,
        }
        self.plan: Plan = unirl.make_plan("grpo", **{**settings, **overrides})
        self.store = LocalWeightStore()
        made = self.plan.pools[0].make_actor(ActorContext(0, 7, self.store))
        assert isinstance(made, Rollout)
        self.rollout = made
        self.publish(0)

    def publish(self, version: int) -> None:
        """Other weights for each version."""
        self.store.publish(flat_weights(tiny_model(version, **SIZES)), version)

    def slot(self, ticket: int) -> Slot:
        return Slot(ticket, ticket, self.plan.learner.spec.allocate(), pool_ticket=ticket)

    async def group(self, ticket: int) -> Group:
        """The whole group of a ticket."""
        slot = self.slot(ticket)
        await self.rollout.produce(slot)
        return group_of(slot)

    async def until(self, tokens: int) -> None:
        """Let the engine run until it has generated so many tokens."""
        while self.rollout.engine.stats()["generated_tokens"] < tokens:
            await asyncio.sleep(0)


def group_of(slot: Slot) -> Group:
    """Checked: the slot's versions are those of its oldest and its newest token of the policy."""
    group = read_group(slot.data, slot.ticket)
    version = group.version[group.mask]
    assert slot.first_version == int(version.min())
    assert slot.last_version == int(version.max())
    return group


def run(bench: Bench, work: Callable[[Bench], Coroutine[Any, Any, Any]]) -> Any:
    async def all_of_it() -> Any:
        try:
            return await asyncio.wait_for(work(bench), 60)
        finally:
            await bench.rollout.close()

    return asyncio.run(all_of_it())


def same(one: Group, other: Group) -> bool:
    names = ("prompt", "token", "starts", "finish", "version", "reward")
    # Keys and values of a partial completion are computed again, in another order of sums.
    close = one.logp.shape == other.logp.shape and torch.allclose(one.logp, other.logp, atol=1e-5)
    return close and all(torch.equal(getattr(one, n), getattr(other, n)) for n in names)


def test_a_group_that_waits_for_the_engine_gives_signs_of_life(model: str) -> None:
    async def work(bench: Bench) -> None:
        await bench.group(0)
        slot, alive = bench.slot(1), asyncio.Event()
        slot.on_progress = alive.set
        await bench.rollout.engine.pause()
        group = asyncio.create_task(bench.rollout.produce(slot))
        await asyncio.wait_for(alive.wait(), 10)
        await bench.rollout.engine.resume()
        await group
        group_of(slot)

    run(Bench(model), work)


def test_tokens_on_both_sides_of_a_swap_bear_the_version_that_drew_them(model: str) -> None:
    async def work(bench: Bench) -> tuple[Group, Group]:
        first = asyncio.create_task(bench.group(0))
        await bench.until(6 * GROUP)
        bench.publish(1)
        second = await bench.group(1)  # to begin it, the engine takes the newer weights
        return await first, second

    first, second = run(Bench(model), work)
    assert set(second.version.tolist()) == {1}
    spans = []
    for i in range(GROUP):
        versions = first.version[int(first.starts[i]) : int(first.starts[i + 1])].tolist()
        assert versions == sorted(versions) and set(versions) <= {0, 1}
        spans.append(len(set(versions)))
    assert max(spans) == 2
    alone = run(Bench(model), lambda bench: bench.group(0))
    old = first.version == 0
    # What was drawn before the swap is what would have been drawn without it.
    assert torch.equal(first.token[: int(old[: int(first.starts[1])].sum())],
                       alone.token[: int(old[: int(first.starts[1])].sum())])  # fmt: skip


def queue_of(bench: Bench) -> TableServer:
    queue = LocalTransport().queue(bench.plan.learner.spec, bench.plan.learner.queue)
    assert isinstance(queue, TableServer)
    return queue


@pytest.mark.parametrize("version", [0, 1])
def test_another_engine_continues_with_what_a_lost_one_had(model: str, version: int) -> None:
    """version: of the weights that the other engine has."""
    saves = {"rollout.save_seconds": 1e-3}

    async def lose(bench: Bench) -> tuple[QueueServer, Slot, Group]:
        queue = queue_of(bench)
        client = queue.join()
        slot = client.acquire(0.0)
        group = asyncio.create_task(bench.rollout.produce(slot))
        await bench.until(6 * GROUP)
        while not slot.is_saved:
            await asyncio.sleep(0)
        lost = read_group(slot.data, slot.ticket).copy()
        queue.revoke(client.member, "actor_died", reissue=True)  # as its supervisor does
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        return queue, slot, lost

    async def proceed(bench: Bench) -> Group:
        if version:
            bench.publish(version)
        slot = queue.join().acquire(0.0)
        assert slot.is_saved and slot.ticket == before.ticket
        await bench.rollout.produce(slot)
        assert not slot.is_saved
        return group_of(slot)

    queue, before, lost = run(Bench(model, **saves), lose)
    found = run(Bench(model, **saves), proceed)
    assert 0 < int(lost.starts[-1]) < int(found.starts[-1])
    for i in range(GROUP):
        old, new = (slice(int(one.starts[i]), int(one.starts[i + 1])) for one in (lost, found))
        kept = int(lost.lengths[i])
        assert torch.equal(found.token[new][:kept], lost.token[old])
        assert torch.equal(found.logp[new][:kept], lost.logp[old])
        assert found.version[new].tolist() == [0] * kept + [version] * (
            int(found.lengths[i]) - kept
        )
    if not version:  # as if nothing had happened
        assert same(found, run(Bench(model), lambda bench: bench.group(0)))


def test_broken_answers_of_a_server_cost_no_group_and_are_counted(model: str) -> None:
    async def work(bench: Bench) -> tuple[list[float], dict[str, float]]:
        retries = []
        for ticket, broken in enumerate(([], ["json", "", "reset", "503"], [])):
            server.broken = list(broken)
            slot = bench.slot(ticket)
            await bench.rollout.produce(slot)
            assert set(group_of(slot).version.tolist()) == {0}
            retries.append(float(slot.data["retries"]))
        return retries, dict(bench.rollout.engine.stats())

    network = tiny_model(0, **SIZES)
    with CompletionServer(kind="sglang", model=model, network=network) as server:
        settings = {"engine.kind": "openai", "engine.url": server.url, "sampling.max_tokens": 6}
        retries, stats = run(Bench(model, **settings), work)
    assert retries == [0, 3, 0] and stats["retries"] == 3


def test_an_interrupted_group_continues_as_if_nothing_had_been(model: str) -> None:
    async def interrupted(bench: Bench) -> tuple[Group, float]:
        for tokens in (5 * GROUP, 12 * GROUP):
            work = asyncio.create_task(bench.group(3))
            await bench.until(tokens)
            await bench.rollout.interrupt()
            with pytest.raises(ReissueSlot):
                await work
        group = await bench.group(3)
        return group, bench.rollout.engine.stats()["generated_tokens"]

    group, generated = run(Bench(model), interrupted)
    whole = run(Bench(model), lambda bench: bench.group(3))
    assert same(group, whole)
    assert generated == len(whole.token)  # no token was generated twice


def test_a_partial_completion_continues_under_newer_weights_while_young_enough(
    model: str,
) -> None:
    async def work(bench: Bench, newer: int) -> tuple[Group, float]:
        first = asyncio.create_task(bench.group(3))
        await bench.until(5 * GROUP)
        await bench.rollout.interrupt()
        with pytest.raises(ReissueSlot):
            await first
        bench.publish(newer)
        return await bench.group(3), bench.rollout.engine.stats()["generated_tokens"]

    young, generated = run(Bench(model), lambda bench: work(bench, 1))
    assert set(young.version.tolist()) == {0, 1} and generated == len(young.token)
    # Under staleness 1, what version 0 has drawn must not be learned beside version 2.
    old, _ = run(Bench(model), lambda bench: work(bench, 2))
    assert set(old.version.tolist()) == {2}

    async def fresh(bench: Bench) -> Group:
        bench.publish(2)
        return await bench.group(3)

    assert same(old, run(Bench(model), fresh))


def test_a_completion_depends_on_its_ticket_alone(model: str) -> None:
    async def together(bench: Bench) -> list[Group]:
        return list(await asyncio.gather(*(bench.group(ticket) for ticket in range(3))))

    async def backwards(bench: Bench) -> list[Group]:
        return [await bench.group(ticket) for ticket in (2, 1, 0)][::-1]

    for one, other in zip(run(Bench(model), together), run(Bench(model), backwards), strict=True):
        assert same(one, other)
        begins = other.token[other.starts[:-1].long()]
        assert len(set(begins.tolist())) > 1  # the completions of a group differ


@pytest.mark.parametrize("rule", ["skip", "discard", "train"])
def test_groups_without_spread_are_discarded_where_that_is_asked(model: str, rule: str) -> None:
    bench = Bench(model, **CONSTANT, **{"rollout.zero_variance": rule})
    if rule != "discard":
        assert run(bench, lambda bench: bench.group(0)).reward.tolist() == [[1.0]] * GROUP
        return
    with pytest.raises(DiscardSlot) as caught:
        run(bench, lambda bench: bench.group(0))
    assert caught.value.reason == "zero_variance" and "zero_variance" in bench.plan.learner.reasons


def test_groups_with_spread_are_kept(model: str) -> None:
    bench = Bench(model, **LETTERS, **{"rollout.zero_variance": "discard"})
    group = run(bench, lambda bench: bench.group(0))
    assert len(set(group.reward.flatten().tolist())) > 1


def test_a_filter_of_the_users_own_decides_what_is_kept(model: str) -> None:
    bench = Bench(model, **{"rollout.filter": "tests.llm.rollout_code:even_prompts"})

    async def work(bench: Bench) -> None:
        await bench.group(0)
        with pytest.raises(DiscardSlot) as caught:
            await bench.group(1)
        assert caught.value.reason == "filtered" and "filtered" in bench.plan.learner.reasons

    run(bench, work)


def test_a_group_that_nothing_could_judge_is_discarded(model: str) -> None:
    bench = Bench(model, **{"reward.weights": {"tests.llm.reward_functions:broken": 1.0}})
    with pytest.raises(DiscardSlot) as caught:
        run(bench, lambda bench: bench.group(0))
    assert caught.value.reason == "reward_failed" and "reward_failed" in bench.plan.learner.reasons


def test_one_completion_that_could_not_be_judged_does_not_cost_the_group(model: str) -> None:
    async def work(bench: Bench) -> list[Group]:
        return list(await asyncio.gather(*(bench.group(ticket) for ticket in range(8))))

    groups = run(Bench(model, **LETTERS), work)
    outcomes = torch.cat([group.outcome for group in groups]).flatten()
    rewards = torch.cat([group.reward for group in groups]).flatten()
    assert 0 < int((outcomes == FAILED).sum()) < len(outcomes) // 2
    assert set(outcomes.tolist()) == {SCORE, FAILED}
    assert (rewards[outcomes == FAILED] == 0).all() and (rewards[outcomes == SCORE] > 0).all()


def test_a_reward_that_takes_too_long_has_timed_out(model: str) -> None:
    weights = {"tests.llm.rollout_code:constant": 1.0, "tests.llm.rollout_code:never": 0.0}
    bench = Bench(model, **{"reward.weights": weights, "reward.timeout_seconds": 0.1})
    group = run(bench, lambda bench: bench.group(0))
    assert group.outcome.tolist() == [[SCORE, TIMED_OUT]] * GROUP


def test_a_rollout_function_of_the_users_own_generates_the_group(model: str) -> None:
    name = "rollout.function"
    bench = Bench(model, **{name: "tests.llm.rollout_code:two_turns"})
    group = run(bench, lambda bench: bench.group(0))
    short = run(Bench(model, **{"sampling.max_tokens": 6}), lambda bench: bench.group(0))
    assert torch.equal(group.token, short.token) and int(group.lengths.max()) == 6


def test_what_a_tool_says_is_read_and_not_learned(model: str) -> None:
    bench = Bench(model, **{"rollout.function": "tests.llm.rollout_code:with_a_tool"})
    group = run(bench, lambda bench: bench.group(0))
    some = 0
    for begin, end in itertools.pairwise(group.starts.tolist()):
        token, mask = group.token[begin:end].tolist(), group.mask[begin:end].tolist()
        if end - begin <= 2:
            assert all(mask)
            continue
        some += 1
        assert tuple(token[2:4]) == OBSERVATION
        assert mask == [True, True, False, False] + [True] * (end - begin - 4)
        assert group.version[begin + 2 : begin + 4].tolist() == [NOBODY, NOBODY]
        assert group.logp[begin + 2 : begin + 4].tolist() == [0.0, 0.0]
        assert all(group.logp[begin + 4 : end] < 0)
    assert some
    assert set(group.version[group.mask].tolist()) == {0}
    tokens = TokenBatch.of([group], (1.0,))
    assert tokens.mask.tolist() == group.mask.tolist()


def test_an_own_function_continues_and_does_not_see_an_interruption(model: str) -> None:
    settings = {"rollout.function": "tests.llm.rollout_code:asks_a_tool", "mode": "partial"}

    async def interrupted(bench: Bench) -> tuple[Group, float]:
        for tokens in (2, 3 * GROUP):
            work = asyncio.create_task(bench.group(3))
            await bench.until(tokens)
            await bench.rollout.interrupt()
            with pytest.raises(ReissueSlot):
                await work
        return await bench.group(3), bench.rollout.engine.stats()["generated_tokens"]

    rollout_code.ASKED.clear()
    group, generated = run(Bench(model, **settings), interrupted)
    assert sorted(rollout_code.ASKED) == sorted({*rollout_code.ASKED}) and rollout_code.ASKED
    assert generated == int(group.mask.sum())  # nothing was drawn twice
    assert same(group, run(Bench(model, **settings), lambda bench: bench.group(3)))


def test_an_own_function_that_was_interrupted_too_long_ago_begins_again(model: str) -> None:
    settings = {"rollout.function": "tests.llm.rollout_code:asks_a_tool", "mode": "partial"}

    async def work(bench: Bench) -> Group:
        first = asyncio.create_task(bench.group(3))
        await bench.until(GROUP)
        await bench.rollout.interrupt()
        with pytest.raises(ReissueSlot):
            await first
        bench.publish(2)
        return await bench.group(3)

    group = run(Bench(model, **settings), work)
    assert set(group.version[group.mask].tolist()) == {2}


def test_a_rollout_function_that_returns_too_few_is_refused(model: str) -> None:
    bench = Bench(model, **{"rollout.function": "tests.llm.rollout_code:one_too_few"})
    with pytest.raises(UniRLError, match=r"rollout.function.*3 completions.*4 requests"):
        run(bench, lambda bench: bench.group(0))


@pytest.mark.parametrize("key", ["rollout.function", "rollout.filter"])
def test_own_code_that_does_not_exist_is_found_before_anything_starts(
    model: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(UniRLError, match="did you mean"):
        Bench(model, **{key: "tests.llm.rollout_code:even_prompt"})


def test_groups_of_two_tasks_fit_a_common_shape(model: str) -> None:
    short, long = GroupShape(GROUP, 8, 2 * TOKENS), GroupShape(GROUP, 16, TOKENS)
    shape = common_shape([short, long])
    assert shape == GroupShape(GROUP, 16, 2 * TOKENS)
    bench = Bench(model)
    slot = Slot(0, 3, shape.spec().allocate(), pool_ticket=3)
    asyncio.run(bench.rollout.produce(slot))
    wanted = asyncio.run(Bench(model).group(3))
    found = group_of(slot)
    assert torch.equal(found.token, wanted.token) and torch.equal(found.prompt, wanted.prompt)
    with pytest.raises(UniRLError, match=r"rollout.group_size.*4 and 5"):
        common_shape([short, GroupShape(GROUP + 1, 8, TOKENS)])

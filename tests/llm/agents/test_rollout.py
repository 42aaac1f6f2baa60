"""Groups of episodes with a real engine: how they end, what is tried again, what is no score."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.llm.agents import agent_code
from unirl.core.actor import ActorContext
from unirl.core.sample import Slot
from unirl.errors import DiscardSlot, UniRLError
from unirl.llm.agents.rollout import AgentRollout
from unirl.llm.engine import Completion, EngineFailed, Request
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.group import EPISODE_COUNTS, Group, read_group
from unirl.llm.models.model import flat_weights
from unirl.llm.models.tiny import make_tiny, tiny_model
from unirl.llm.outcome import ABSENT, ENDINGS, SCORE
from unirl.transports.local import LocalWeightStore

SIZES = {"width": 32, "layers": 2}
CODE = "tests.llm.agents.agent_code:"
JUDGED = {"reward.weights": {f"{CODE}judged": 1.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", **SIZES))


def plan_of(model: str, **overrides: Any) -> Any:
    settings: dict[str, Any] = {
        "model.path": model,
        "task.name": "products",
        "task.max_prompt": 16,
        "rollout.group_size": 3,
        "sampling.max_tokens": 8,
        "agent.max_episode_tokens": 64,
        "mode": "async",
    }
    return unirl.make_plan("agent", **{**settings, **overrides})


def produce(model: str, tickets: int = 1, **overrides: Any) -> tuple[list[Group], AgentRollout]:
    """The groups of the first tickets, made side by side."""
    plan, store = plan_of(model, **overrides), LocalWeightStore()
    rollout = plan.pools[0].make_actor(ActorContext(0, 7, store))
    assert isinstance(rollout, AgentRollout)
    store.publish(flat_weights(tiny_model(3, **SIZES)), 3)
    slots = [Slot(i, i, plan.learner.spec.allocate(), pool_ticket=i) for i in range(tickets)]

    async def run() -> None:
        try:
            await asyncio.gather(*(rollout.produce(slot) for slot in slots))
        finally:
            await rollout.close()

    asyncio.run(run())
    return [read_group(slot.data, slot.ticket).copy() for slot in slots], rollout


def endings(group: Group) -> list[str]:
    assert group.ending is not None
    return [ENDINGS[code] for code in group.ending.tolist()]


def count(group: Group, name: str) -> float:
    assert group.counts is not None
    return float(group.counts[EPISODE_COUNTS.index(name)])


def test_an_own_agent_is_paid_by_turn_and_by_outcome(model: str) -> None:
    [group, other], _ = produce(model, 2, **{"agent.function": f"{CODE}two_turns"})
    assert endings(group) == ["stop"] * 3 and count(group, "turns") == 6
    assert group.outcome.eq(SCORE).all() and group.step_reward is not None
    assert set(group.reward.flatten().tolist()) <= {0.0, 1.0}
    assert group.step_reward.sum() == 1.5 and group.step_reward[group.mask].sum() == 1.5
    assert group.version[group.mask].eq(3).all() and group.version[~group.mask].eq(-1).all()
    assert group.turn is not None and set(group.turn.tolist()) == {0, 1}
    assert other.ticket == 1 and other.prompt.tolist() != group.prompt.tolist()


def test_the_same_ticket_gives_the_same_episodes(model: str) -> None:
    [one], _ = produce(model, **{"agent.function": f"{CODE}two_turns"})
    [other], _ = produce(model, **{"agent.function": f"{CODE}two_turns"})
    assert one.token.tolist() == other.token.tolist()


def test_what_a_group_does_not_wait_for_has_no_score(model: str) -> None:
    agent_code.BEGUN.clear()
    settings = {"agent.function": f"{CODE}first_is_slow", "queue.batch_size": 1, **JUDGED}
    [group, other], _ = produce(model, 2, **settings)
    assert endings(group) == ["stop", "stop", "aborted"] and count(group, "cancelled") == 1
    assert group.outcome.flatten().tolist() == [SCORE, SCORE, ABSENT]
    assert set(group.owner.tolist()) == {0, 1} and group.mask.any()
    assert endings(other) == ["stop"] * 3 and count(other, "cancelled") == 0


def test_what_the_policy_cannot_have_caused_is_tried_again(model: str) -> None:
    agent_code.FAILURES.clear()
    [group], _ = produce(model, **{"agent.function": f"{CODE}fails_once"})
    assert endings(group) == ["stop"] * 3 and count(group, "retried") == 1


@pytest.mark.parametrize("agent", ["always_fails", "never_asks"])
def test_it_is_never_a_score(model: str, agent: str) -> None:
    with pytest.raises(DiscardSlot, match="infrastructure"):
        produce(model, **{"agent.function": CODE + agent})


def test_an_agent_that_swallows_errors_does_not_hide_a_budget_that_is_used_up(model: str) -> None:
    [group], _ = produce(model, **{"agent.function": f"{CODE}swallows", **JUDGED})
    assert endings(group) == ["context"] * 3


def test_an_engine_that_fails_is_not_scored_whatever_the_agent_makes_of_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: HfEngine, request: Request) -> Completion:
        raise EngineFailed("the engine has died", "a test wants it to", "try again")

    monkeypatch.setattr(HfEngine, "generate", fails)
    with pytest.raises(EngineFailed, match="has died"):
        produce(model, **{"agent.function": f"{CODE}swallows"})


@pytest.mark.parametrize(
    ("agent", "ending", "settings"),
    [
        ("crashes", "crash", {}),
        ("sleeps", "time", {"agent.episode_seconds": 3.0}),
        ("never_ends", "max_turns", {"agent.max_turns": 3, "agent.max_episode_tokens": 200}),
        ("never_ends", "context", {"agent.max_turns": 99}),
    ],
)
def test_what_the_policy_can_cause_is_scored_under_its_name(
    model: str, agent: str, ending: str, settings: dict[str, Any]
) -> None:
    [group], _ = produce(model, **{"agent.function": CODE + agent, **JUDGED, **settings})
    assert endings(group) == [ending] * 3
    assert group.outcome.eq(SCORE).all()
    score = {"time": 0.25, "crash": 0.125}.get(ending, 0.5)
    assert group.reward.flatten().tolist() == [score] * 3
    assert group.mask.any()


def test_a_rewritten_history_is_a_segment_of_its_own(model: str) -> None:
    settings = {"agent.function": f"{CODE}forgets", "agent.max_segments": 2}
    [group], _ = produce(model, **settings)
    assert group.owner.tolist() == [0, 0, 1, 1, 2, 2] and group.shared is not None
    assert group.shared.tolist() == [True, False] * 3 and count(group, "rewritten") == 3
    for c, (begin, end) in enumerate(itertools.pairwise(group.starts.tolist())):
        # One that brings its own prompt has it in front, and learns nothing of it.
        assert bool(group.mask[begin]) == (c % 2 == 0) and group.mask[begin:end].any()


def test_slow_episodes_of_a_larger_group_are_cancelled(model: str) -> None:
    settings = {"agent.function": f"{CODE}first_hangs", "agent.oversample": 1}
    started = time.monotonic()
    [group], _ = produce(model, **settings)
    assert endings(group) == ["stop"] * 3 and count(group, "cancelled") == 1
    assert time.monotonic() - started < 15, "nor does the group wait until they have let go"


def test_a_larger_group_is_whole_without_an_episode_that_fails(model: str) -> None:
    settings = {"agent.function": f"{CODE}first_fails", "agent.retries": 0}
    [group], _ = produce(model, **settings, **{"agent.oversample": 1})
    assert endings(group) == ["stop"] * 3 and count(group, "cancelled") == 0
    with pytest.raises(DiscardSlot, match="infrastructure"):
        produce(model, **settings)


def test_attempts_share_a_deadline_and_one_that_reaches_it_is_not_scored(model: str) -> None:
    settings = {"agent.function": f"{CODE}fails_and_then_hangs", "agent.episode_seconds": 2.0}
    started = time.monotonic()
    with pytest.raises(DiscardSlot, match="infrastructure"):
        produce(model, **settings)
    assert time.monotonic() - started < 12


def test_a_process_reward_that_hangs_holds_nothing_up(model: str) -> None:
    settings = {"agent.function": f"{CODE}two_turns", "agent.process_reward": f"{CODE}hangs"}
    started = time.monotonic()
    with pytest.raises(DiscardSlot, match="reward_failed"):
        produce(model, **settings, **{"agent.tool_seconds": 0.2, "agent.credit": "turn"})
    assert time.monotonic() - started < 15


def test_a_process_reward_may_pay_each_token(model: str) -> None:
    settings = {"agent.function": f"{CODE}two_turns", "agent.credit": "turn"}
    [group], _ = produce(model, **settings, **{"agent.process_reward": f"{CODE}by_token"})
    assert group.turn is not None and group.step_reward is not None
    paid = group.step_reward
    first, second = (group.mask & (group.turn == number) for number in (0, 1))
    assert set(paid[first].tolist()) <= {0.0, 1.0} and paid[first].sum() > 3
    # The agent pays 0.5 by itself.
    assert paid[second].count_nonzero() == 3 and set(paid[second].tolist()) == {0.0, 3.5}
    with pytest.raises(UniRLError, match=r"1 numbers for turn 0"):
        produce(model, **settings, **{"agent.process_reward": f"{CODE}too_few"})


def test_a_turn_prefills_only_what_is_new(model: str) -> None:
    settings = {
        "agent.function": f"{CODE}talks",
        "agent.max_turns": 10,
        "agent.max_episode_tokens": 300,
        "sampling.max_tokens": 6,
    }
    groups, rollout = produce(model, 2, **settings)
    different = sum(len(group.prompt) + len(group.token) for group in groups)
    not_drawn = different - sum(int(group.mask.sum()) for group in groups)
    stats = rollout.engine.stats()
    assert [count(group, "turns") for group in groups] == [30, 30]
    assert stats["prefilled_tokens"] <= 1.2 * different
    # Nothing twice: what was given, and the last token that each turn before had drawn.
    assert stats["prefilled_tokens"] <= not_drawn + 2 * 3 * 9
    same, plain = produce(model, 2, **settings, **{"engine.prefix_cache_gib": 0.0})
    assert plain.engine.stats()["prefilled_tokens"] > 3 * different
    assert [group.token.tolist() for group in groups] == [group.token.tolist() for group in same]


def test_tools_are_called_and_what_they_say_is_not_learned(model: str) -> None:
    settings = {"agent.tools": ("calculator",), "agent.calls": "brief", **JUDGED}
    groups, _ = produce(model, 8, **settings)
    for group in groups:
        assert group.turn is not None
        assert not group.mask[group.version == -1].any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "nothing to act with"),
        ({"agent.tools": ("calculater",)}, "there is no tool"),
        ({"agent.world": "nothing:x"}, "there is no world"),
        ({"agent.function": "tests.llm.agents.agent_code:missing"}, "does not exist"),
        ({"agent.function": f"{CODE}sleeps", "agent.world": "gym:x"}, "one of function"),
        ({"agent.function": f"{CODE}sleeps", "mode": "partial"}, "mode partial"),
        ({"agent.function": f"{CODE}sleeps", "agent.max_episode_tokens": 4}, "at least one turn"),
        ({"agent.function": f"{CODE}sleeps", "agent.episode_seconds": 600.0}, "waits 600 s"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(
    model: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UniRLError, match=said) as refused:
        plan_of(model, **settings)
    assert len(refused.value.parts) == 3


def test_evaluations_run_the_agent(model: str) -> None:
    plan = plan_of(model, **{"agent.function": f"{CODE}two_turns"})
    assert plan.learner.make_evaluator is not None
    evaluator = plan.learner.make_evaluator(1)
    try:
        result = evaluator.evaluate(flat_weights(tiny_model(3, **SIZES)), 6)
    finally:
        evaluator.close()
    assert set(result.returns) <= {0.0, 1.0} and len(result.returns) == 6
    assert Path(model).exists()

"""Evaluations of language models: as rollouts do it, and by the engines of the run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.llm.rollout_code import OBSERVATION, Counted
from unirl.core.actor import ActorContext
from unirl.llm.evaluation_link import EvaluationLink
from unirl.llm.generating import make_rollout
from unirl.llm.models.model import flat_weights
from unirl.llm.models.tiny import make_tiny, tiny_model
from unirl.llm.rollout import Answer
from unirl.runners.plan import Plan
from unirl.transports.local import LocalWeightStore

SIZES = {"width": 32, "layers": 1}
CODE = "tests.llm.rollout_code"
NUM = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", **SIZES))


def plan_of(model: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "model.path": model,
        "task.name": "reverse",
        "task.max_prompt": 16,
        "sampling.max_tokens": 6,
        "rollout.group_size": 2,
        "queue.batch_size": 2,
        "run.total_steps": 12,
        "run.eval_steps": 6,
        "run.eval_episodes": NUM,
    }
    return unirl.make_plan("grpo", **{**settings, **changes})


def linked(plan: Plan, seconds: float = 60.0) -> Plan:
    """The plan with evaluations by its own engine: what the recipe does with engines that are not
    hf, which would take a minute to start here.
    """
    link = EvaluationLink(1, apart=not plan.runner.is_inline, seconds=seconds)
    learner, pool = plan.learner, plan.pools[0]
    assert isinstance(learner.make, partial) and isinstance(learner.make_evaluator, partial)
    assert isinstance(pool.make_actor, partial)
    return plan.with_learner(
        make=partial(learner.make, link=link),
        make_evaluator=partial(learner.make_evaluator, link=link),
    ).with_pool(make_actor=partial(pool.make_actor, link=link))


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run_dir / "eval").glob("*.json"))]


def test_evaluations_do_what_rollout_function_does_and_rewards_get_the_models_own_words(
    model: str, tmp_path: Path
) -> None:
    plan = plan_of(
        model,
        **{
            "rollout.function": f"{CODE}:with_a_tool",
            "reward.weights": {f"{CODE}:own_words": 1.0},
        },
    )
    unirl.run(plan, tmp_path, console=False)
    for found in evaluations(tmp_path):
        assert len(found["returns"]) == NUM
        # Its tool speaks after two tokens, unless the model has ended by then.
        longer = [length > 2 for length in found["lengths"]]
        assert any(longer)
        heard = [float(len(OBSERVATION)) if each else 0.0 for each in longer]
        assert found["returns"] == heard


def test_the_runs_engine_says_what_an_engine_of_its_own_would(model: str, tmp_path: Path) -> None:
    for name, plan in ("own", plan_of(model)), ("run", linked(plan_of(model))):
        unirl.run(plan, tmp_path / name, console=False)
    own, run = evaluations(tmp_path / "own"), evaluations(tmp_path / "run")
    assert len(own) == 2 and own == run


def test_an_engine_in_another_process_answers(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plan = linked(plan_of(model, mode="async"))
        unirl.run(plan, tmp_path, console=False)
    assert [len(each["returns"]) for each in evaluations(tmp_path)] == [NUM, NUM]
    assert "this process loads the model" not in caplog.text


def test_where_no_engine_answers_this_process_does(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(model)
    assert isinstance(plan.learner.make_evaluator, partial)
    link = EvaluationLink(1, apart=True, seconds=0.5)
    link.open()
    evaluator = plan.learner.make_evaluator.func(
        7, **{**plan.learner.make_evaluator.keywords, "link": link}
    )
    with caplog.at_level(logging.WARNING):
        result = evaluator.evaluate(flat_weights(tiny_model(1, **SIZES)), NUM)
    evaluator.close()
    assert len(result.returns) == NUM
    assert "no engine has answered an evaluation for 0.5 s" in caplog.text


def _serve(link: EvaluationLink, plan: Plan, die_at: int) -> None:
    """What an actor process does; it is killed with the answer of number die_at."""
    store = LocalWeightStore()
    store.publish(flat_weights(tiny_model(1, **SIZES)), 3)
    rollout = make_rollout(ActorContext(0, 7, store), config=plan.config, link=link)
    answer = rollout.answer

    async def mortal(number: int, **asked: Any) -> Answer | None:
        if number == die_at:
            await asyncio.sleep(0.3)  # others have been sent
            os.kill(os.getpid(), signal.SIGKILL)
        return await answer(number, **asked)

    rollout.answer = mortal  # type: ignore[method-assign]

    async def until_killed() -> None:
        visitors = link.visitors(0)
        await visitors.open(rollout)
        await asyncio.sleep(60)

    asyncio.run(until_killed())


@pytest.mark.slow  # two processes that import torch and transformers
def test_an_engine_that_dies_meanwhile_is_asked_again_when_it_is_replaced(model: str) -> None:
    import multiprocessing

    plan = plan_of(model)
    link = EvaluationLink(1, apart=True, seconds=30.0)
    link.open()
    spawn = multiprocessing.get_context("spawn")
    first = spawn.Process(target=_serve, args=(link, plan, 5), daemon=True)
    second = spawn.Process(target=_serve, args=(link, plan, -1), daemon=True)
    first.start()

    async def replaced() -> None:
        while first.is_alive():
            await asyncio.sleep(0.05)
        second.start()

    import threading

    watch = threading.Thread(target=lambda: asyncio.run(replaced()))
    watch.start()
    try:
        started = time.monotonic()
        found = link.ask(NUM, seed=7, deterministic=True)
        assert found is not None and len(found) == NUM
        assert all(each is not None for each in found)
        assert time.monotonic() - started < 60
        assert first.exitcode == -signal.SIGKILL
    finally:
        watch.join(30)
        for process in (first, second):
            process.kill()
            process.join(10)


def test_data_is_looked_at_once(model: str, tmp_path: Path) -> None:
    Counted.looked_at = 0
    unirl.run(plan_of(model, **{"task.name": f"{CODE}:counted_task"}), tmp_path, console=False)
    asked = 2 * NUM + 12 // 2
    assert 320 <= Counted.looked_at <= 320 + asked

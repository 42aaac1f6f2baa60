"""A teacher behind a server teaches what the same teacher beside the learner would."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("httpx2", reason="servers are asked through it")

import unirl
from tests.llm.completion_server import CompletionServer
from tests.llm.packed_groups import VOCAB, make_groups
from tests.llm.test_learner import batch_of, make_learner
from tests.system.grpo_settings import SMALL
from unirl.errors import ActorFailed, UniRLError
from unirl.llm.models.model import ModelConfig
from unirl.llm.models.tiny import make_tiny
from unirl.llm.training.distill import Teacher, TeacherConfig, make_teacher
from unirl.llm.training.teacher_server import TeacherServer
from unirl.llm.training.token_batch import TokenBatch
from unirl.storage.checkpoint import load_checkpoint

GROUPS = make_groups((3, [1, 4, 2]), (2, [3, 1]), (1, [2, 2, 2, 5]), seed=3)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
EVERYTHING = torch.ones(9, dtype=torch.bool)
PAUSES = (0.01, 0.03, 0.1, 0.2)
"""Between attempts: a tenth of the usual ones."""


def teacher_at(
    server: CompletionServer, name: str = "table", seconds: float = 20.0
) -> TeacherServer:
    return TeacherServer(server.url, name, seconds=seconds, pauses=PAUSES)


def wanted(train: Tensor) -> Tensor:
    """What the table says of each token, completion by completion."""
    logp, found, number = TABLE.log_softmax(-1), [], 0
    for group in GROUPS:
        for begin, end in itertools.pairwise(group.starts.tolist()):
            text = [int(group.prompt[-1]), *group.token[begin:end].tolist()]
            values = [float(logp[a, b]) for a, b in itertools.pairwise(text)]
            found += values if train[number] else [0.0] * len(values)
            number += 1
    return torch.tensor(found)


@pytest.mark.parametrize("left_out", [[], [0, 3], [3, 4]])
def test_each_token_gets_the_log_probability_of_its_own_completion(left_out: list[int]) -> None:
    train = EVERYTHING.clone()
    train[left_out] = False
    with CompletionServer(weights=TABLE, failures=2) as server:
        teacher = teacher_at(server)
        teacher.check()
        found = teacher.logp(TokenBatch.of(GROUPS, (1.0,)), train)
        asked = sum(len(body["prompt"]) for body in server.bodies)
    torch.testing.assert_close(found, wanted(train))
    assert asked == 9 - len(left_out)


def test_a_learner_is_taught_by_it() -> None:
    with CompletionServer(weights=TABLE) as server:
        teacher = Teacher(teacher_at(server), alone=True)
        groups = make_groups((3, [1, 4]), (2, [3, 1]), seed=3)
        metrics = make_learner(teacher=teacher).step(batch_of(groups)).flush()
    assert metrics["losses/grad_norm"] > 0
    assert metrics["kl_to_teacher"] != 0


def test_what_a_server_does_not_tell_is_no_silent_zero() -> None:
    tokens = TokenBatch.of(GROUPS, (1.0,))
    with CompletionServer(weights=TABLE, gives_logp=False) as server:
        with pytest.raises(ActorFailed, match="no log-probability for each token"):
            teacher_at(server).logp(tokens, EVERYTHING)
        other = teacher_at(server, "other")
        with pytest.raises(UniRLError, match=r"has no model 'other'") as caught:
            other.check()
        assert "serves table" in str(caught.value)
        assert not isinstance(caught.value, ActorFailed)  # nothing has begun
        with pytest.raises(ActorFailed, match=r"status 404: .*does not exist"):
            other.logp(tokens, EVERYTHING)
        assert sum(body["model"] == "other" for body in server.bodies) <= len(GROUPS)  # once each


def test_a_server_that_is_gone_is_reported_plainly_and_waited_for() -> None:
    tokens = TokenBatch.of(GROUPS, (1.0,))
    with CompletionServer(weights=TABLE) as server:
        server.failures = 8  # more than one call repeats
        torch.testing.assert_close(teacher_at(server).logp(tokens, EVERYTHING), wanted(EVERYTHING))
    with pytest.raises(UniRLError, match="cannot be reached") as gone:
        teacher_at(server).check()
    assert "teacher.url" in str(gone.value)
    # Not the learner's fault: what it has is saved before the run ends.
    with pytest.raises(ActorFailed, match="cannot be reached"):
        teacher_at(server, seconds=0.2).logp(tokens, EVERYTHING)


def test_a_server_that_fails_for_longer_than_its_time_is_reported_plainly() -> None:
    tokens = TokenBatch.of(GROUPS, (1.0,))
    with CompletionServer(weights=TABLE, faults={"/v1/completions": 502}) as server:
        teacher = teacher_at(server, seconds=0.2)
        with pytest.raises(ActorFailed, match=r"refuses.*status 502: .*it is broken"):
            teacher.logp(tokens, EVERYTHING)


def test_what_was_learned_is_saved_when_the_server_refuses(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "tiny"))
    table = torch.randn(128, 128, generator=torch.Generator().manual_seed(5))
    with CompletionServer(weights=table) as server:
        settings = {"path": folder, "url": server.url, "served_name": "table"}
        plan = unirl.make_plan(
            "grpo",
            **SMALL,
            **{f"teacher.{name}": value for name, value in settings.items()},
            **{"model.path": folder, "rollout.group_size": 4, "queue.batch_size": 2},
        )

        def make_learner(context: Any) -> Any:
            learner = plan.learner.make(context)
            step = learner.step

            def refused_later(batch: Any) -> Any:
                if learner.version == 2:
                    server.faults["/v1/completions"] = 400
                return step(batch)

            learner.step = refused_later
            return learner

        with pytest.raises(ActorFailed, match="status 400"):
            unirl.run(plan.with_learner(make=make_learner), tmp_path / "run", console=False)
    assert load_checkpoint(tmp_path / "run").state["version"] == 2


def test_settings_lead_to_a_server_or_say_why_not(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "teacher", seed=7))

    def made(temperature: float = 1.0, **settings: Any) -> Teacher | None:
        config = TeacherConfig(path=folder, coef=0.5, **settings)
        return make_teacher(config, ModelConfig(), torch.device("cpu"), temperature=temperature)

    with CompletionServer() as server:
        teacher = made(url=server.url, served_name="table")
        assert teacher is not None and isinstance(teacher.policy, TeacherServer)
        assert teacher.coef == 0.5
        with pytest.raises(UniRLError, match="has no model"):
            made(url=server.url)  # it would have to serve it by its path
        with pytest.raises(UniRLError, match=r"temperature is 0\.7"):
            made(0.7, url=server.url, served_name="table")
    with pytest.raises(UniRLError, match=r"teacher\.url is set without a teacher"):
        TeacherConfig(url="http://127.0.0.1:9/v1")
    with pytest.raises(UniRLError, match=r"teacher\.served_name is set without a server"):
        TeacherConfig(path=folder, served_name="table")
    with pytest.raises(UniRLError, match=r"teacher\.url names a user or a password"):
        TeacherConfig(path=folder, url="http://me:secret@127.0.0.1:9/v1")
    with pytest.raises(UniRLError, match=r"teacher\.timeout_seconds"):
        TeacherConfig(path=folder, timeout_seconds=0)

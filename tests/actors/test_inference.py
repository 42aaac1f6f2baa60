"""Environment workers and policy workers write what one process writes, bit for bit."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from tests.toy_envs import toy_env
from unirl.actors.env_worker import serve_environments
from unirl.actors.groups import GroupsActor
from unirl.actors.inference import (
    PolicyWorker,
    make_policy_worker,
)
from unirl.actors.sampler import SamplerConfig
from unirl.actors.vector import unroll_spec
from unirl.core.actor import ActorContext
from unirl.core.pool import HelperContext
from unirl.core.queue import QueueConfig, QueueServer
from unirl.core.sample import SampleSpec, Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import leaves
from unirl.device import usable_device
from unirl.envs.config import EnvConfig
from unirl.envs.make import spaces
from unirl.errors import QueueClosed, UniRLError
from unirl.handshake.handshake import ACT, BEGIN, HELLO, OBS, SLOT, TURN, Handshake
from unirl.policy import Policy, PolicyConfig
from unirl.supervision.fork_server import process_context
from unirl.transports.local import LocalWeightStore
from unirl.transports.shared import SharedTransport

GAMMA, SEED = 0.9, 11
MLP = PolicyConfig(hidden=(16,))
SMALL = SamplerConfig(num_workers=2, num_groups=2, num_envs=3, unroll_length=5)
CASES: dict[str, tuple[EnvConfig, PolicyConfig, SamplerConfig]] = {
    "box": (EnvConfig("CartPole-v1", "sync"), MLP, SMALL),
    "dict": (EnvConfig("unirl-test/Nested-v0", "sync", import_module="dict_env"), MLP, SMALL),
    "hybrid, masked": (
        EnvConfig(
            "unirl-test/Match-v0",
            "sync",
            kwargs={"mask": "info"},
            import_module="tests.space_envs",
            action_mask="info",
        ),
        MLP,
        SMALL,
    ),
    "image": (
        EnvConfig("ALE/Pong-v5", num_threads=1),
        PolicyConfig(compute_dtype="bfloat16"),
        replace(SMALL, num_envs=2),
    ),
    "recurrent": (
        EnvConfig("unirl/RecallCue-v0", "sync", kwargs={"length": 4}),
        replace(MLP, core="lstm", core_size=8),
        SMALL,
    ),
}


@dataclass
class Setting:
    env: EnvConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    module: Policy
    spec: SampleSpec

    def make(self, context: ActorContext) -> PolicyWorker | GroupsActor:
        return make_policy_worker(
            context, env=self.env, policy=self.policy, sampler=self.sampler, gamma=GAMMA
        )


def setting(env: EnvConfig, policy: PolicyConfig, sampler: SamplerConfig) -> Setting:
    module = Policy(*spaces(env), policy, seed=5)
    spec = unroll_spec(*spaces(env), sampler.shape(0), module.initial_state(1))
    return Setting(env, policy, sampler, module, spec)


@contextmanager
def workers(setting: Setting, queue_config: QueueConfig) -> Iterator[QueueServer]:
    """Real environment processes and a policy worker in a thread, with frozen weights."""
    sampler = setting.sampler
    transport = SharedTransport()
    queue = transport.queue(setting.spec, queue_config)
    weights = transport.weights(setting.module.weights())
    weights.publish(setting.module.weights(), 0)
    handshake = Handshake(sampler.layout(), transport)
    context = process_context(4)
    serve = partial(serve_environments, env=setting.env, sampler=sampler, gamma=GAMMA)
    processes = []
    for index in range(sampler.num_workers):
        seed = derive_seed(SEED + index % sampler.num_policy_workers, "worker", index)
        work = HelperContext(index, seed, handshake, [queue.buffers()])
        processes.append(context.Process(target=run_until_closed, args=(serve, work)))
        processes[-1].start()
    threads = []
    for index in range(sampler.num_policy_workers):
        actor = setting.make(ActorContext(index, SEED + index, weights, handshake=handshake))
        assert isinstance(actor, PolicyWorker)
        threads.append(threading.Thread(target=run_until_closed, args=(actor.serve, queue.join())))
        threads[-1].start()
    try:
        yield queue
    finally:
        queue.close()
        for thread in threads:
            thread.join(60)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0


def run_until_closed(work: Callable[[Any], None], argument: Any) -> None:
    with suppress(QueueClosed):
        work(argument)


def digest(data: Any) -> str:
    found = hashlib.sha256()
    for path, leaf in leaves(data):
        found.update(
            "/".join(path).encode() + leaf.contiguous().view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def taken(queue: QueueServer, num_slots: int) -> list[str]:
    found = []
    for _ in range(num_slots):
        batch = queue.take(0, 60.0)
        found += [digest(slot.data) for slot in batch.slots]
        queue.release(batch)
    return found


def inline(setting: Setting, index: int = 0) -> Iterator[str]:
    """One slot after the other, as one process produces them."""
    store = LocalWeightStore()
    store.publish(setting.module.weights(), 0)
    actor = setting.make(ActorContext(index, SEED + index, store))
    assert isinstance(actor, GroupsActor)
    slot = Slot(0, 0, setting.spec.allocate())
    with closing(actor):
        while True:
            actor.produce(slot)
            yield digest(slot.data)


@pytest.mark.parametrize("threads", [False, True], ids=["in turn", "in threads"])
@pytest.mark.parametrize("case", CASES)
def test_samples_through_workers_are_those_of_one_process_bit_for_bit(
    case: str, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # of the workers too
    env, policy, sampler = CASES[case]
    made = setting(
        env, policy, replace(sampler, batch_rows=sampler.num_envs, group_threads=threads)
    )
    with workers(made, QueueConfig(batch_size=4, max_staleness=0)) as queue:
        found = taken(queue, 4)
    groups = made.sampler.total_groups
    expected: list[str] = []
    for one in inline(made):
        expected.append(one)
        if set(found) <= set(expected) or len(expected) == 40:
            break
    # Each group's unrolls come in order and none is left out, however the groups overtake another.
    seen = {group: [d for d in found if d in expected[group::groups]] for group in range(groups)}
    assert sum(map(len, seen.values())) == len(found) == len(set(found)) == 16
    for group, own in seen.items():
        assert own == expected[group::groups][: len(own)]


def test_several_policy_workers_share_the_environment_workers() -> None:
    env, policy, sampler = CASES["box"]
    made = setting(env, policy, replace(sampler, batch_rows=3, num_policy_workers=2))
    with workers(made, QueueConfig(batch_size=4, max_staleness=0)) as queue:
        found = taken(queue, 5)
    assert set(found) <= {*islice(inline(made), 40), *islice(inline(made, index=1), 40)}
    assert len(set(found)) == 20


def test_batches_of_all_that_wait_give_the_same_actions_up_to_rounding() -> None:
    env, policy, sampler = CASES["box"]
    made = setting(env, policy, replace(sampler, num_workers=1))
    with workers(made, QueueConfig(batch_size=1, max_staleness=0)) as queue:
        batch = queue.take(0, 60.0)
        first = {key: value.clone() for key, value in batch.slots[0].data.items()}
    store = LocalWeightStore()
    store.publish(made.module.weights(), 0)
    actor = made.make(ActorContext(0, SEED, store))
    slot = Slot(0, 0, made.spec.allocate())
    expected = []
    for _ in range(2):  # one of its two groups came first
        actor.produce(slot)  # type: ignore[union-attr]
        expected.append({key: value.clone() for key, value in slot.data.items()})
    own = min(expected, key=lambda data: float((data["obs"] - first["obs"]).abs().sum()))
    assert torch.equal(own["action"], first["action"])
    torch.testing.assert_close(own["logp"], first["logp"])


def test_a_sample_is_as_old_as_its_first_row_and_as_new_as_its_last() -> None:
    env, policy, sampler = CASES["box"]
    made = setting(env, policy, replace(sampler, num_workers=1, num_groups=1, unroll_length=3))
    transport = SharedTransport()
    queue = transport.queue(made.spec, QueueConfig(max_staleness=3))
    weights = transport.weights(made.module.weights())
    handshake = Handshake(made.sampler.layout(), transport)
    worker: Any = made.make(ActorContext(0, SEED, weights, handshake=handshake))
    thread = threading.Thread(target=run_until_closed, args=(worker.serve, queue.join()))
    thread.start()

    def environments_answer(turn: int, wanted: int) -> None:
        """And the policy worker decides."""
        handshake.give_turn(0, turn)
        handshake.actor_events[0].set()
        deadline = time.monotonic() + 60.0
        while handshake.cells[handshake.row(0) + TURN] != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    weights.publish(made.module.weights(), 4)
    environments_answer(HELLO, BEGIN)
    slot_index = handshake.cells[handshake.row(0) + SLOT]
    queue.buffers().buffer(slot_index)["mask"].fill_(True)
    for version in (4, 5, 6):  # each row is acted with other weights
        weights.publish(made.module.weights(), version)
        environments_answer(OBS, ACT)
    environments_answer(OBS, ACT)
    (slot,) = queue.take(6, 5.0).slots
    assert (slot.first_version, slot.last_version) == (4, 6)
    queue.close()
    thread.join(10.0)


def test_a_group_without_a_slot_waits_and_loses_nothing() -> None:
    env, policy, sampler = CASES["box"]
    made = setting(env, policy, replace(sampler, batch_rows=3, num_workers=1))
    # Two groups, one slot: while the learner holds it, both wait with their observations kept.
    with workers(made, QueueConfig(batch_size=1, max_staleness=0)) as queue:
        found = []
        for _ in range(6):
            batch = queue.take(0, 60.0)
            time.sleep(0.05)
            found.append(digest(batch.slots[0].data))
            queue.release(batch)
    assert set(found) <= set(islice(inline(made), 12))
    assert len(set(found)) == 6


def test_an_engine_that_hides_first_observations_is_refused() -> None:
    env = toy_env("Counting", "vector", kwargs={"autoreset_mode": "SameStep"})
    handshake = Handshake(SMALL.layout(), SharedTransport())
    spec = setting(toy_env("Counting", "sync"), MLP, SMALL).spec
    queue = SharedTransport().queue(spec, QueueConfig())
    with pytest.raises(UniRLError, match="first observations"):
        serve_environments(
            HelperContext(0, 0, handshake, [queue.buffers()]),
            env=env,
            sampler=SMALL,
            gamma=GAMMA,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": 2, "num_policy_workers": 3}, "policy workers"),
        ({"num_envs": 8, "batch_rows": 4}, "batch_rows"),
        ({"batch_wait_ms": -1.0}, "batch_wait_ms"),
        ({"device": "gpu"}, "sampler.device 'gpu' is unknown"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UniRLError, match=what):
        SamplerConfig(**settings)


def test_a_device_that_policies_cannot_act_on_is_refused() -> None:
    with pytest.raises(UniRLError, match="without processes there are no policy workers"):
        unirl.make_plan("appo", **{"runner.kind": "inline", "sampler.device": "cuda"})
    if not torch.cuda.is_available():
        with pytest.raises(UniRLError, match="no usable CUDA device"):
            usable_device("sampler.device", "cuda:1")

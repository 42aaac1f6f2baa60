"""What holds for every learner over unrolls, whatever its objective."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tests.learners.test_ppo import act_on_policy
from unirl.core.sample import Batch, Slot
from unirl.core.tree import flatten, tree_map
from unirl.errors import UniRLError
from unirl.learners.impala import ImpalaLearnerConfig
from unirl.learners.objective import Losses, UnrollRows, select
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.ppo import PpoLearnerConfig
from unirl.learners.unroll import UnrollLearner
from unirl.metrics.metrics import Metrics

every_objective = pytest.mark.parametrize("objective", ["impala", "ppo"])
ONE_STEP = {"epochs": 1, "minibatches": 1}


def everything(learner: UnrollLearner) -> dict[str, torch.Tensor]:
    """A copy of all that a checkpoint holds in tensors."""
    state = learner.state_dict()
    found = flatten({"model": state.model, "optimizer": state.optimizer})
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


@every_objective
def test_steps_count_environment_steps_without_fillers(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    learner, _, spec = make(objective)
    slot = random_slot(spec, 1)
    assert not slot.data["mask"].all()
    learner.step(Batch([slot], 0))
    assert (learner.version, learner.num_steps) == (1, int(slot.data["mask"].sum()))


@every_objective
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_two_slots_give_the_gradient_of_one_batch_of_both(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str, core: str
) -> None:
    learner, policy, spec = make(objective, batch_size=2, core=core, **ONE_STEP)
    slots = [random_slot(spec, 1), random_slot(spec, 2)]
    learner.step(Batch(slots, 0))
    other, twin, _ = make(objective, batch_size=2, core=core, **ONE_STEP)
    other.step(Batch(list(reversed(slots)), 0))
    for a, b in zip(policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@every_objective
@pytest.mark.parametrize("core", ["none", "gru"])
def test_what_a_filler_row_holds_changes_nothing(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str, core: str
) -> None:
    results = []
    for junk in (0.0, 1e6):
        learner, _, spec = make(
            objective, core=core, epochs=2, minibatches=2, normalize_advantage=True
        )
        slot = random_slot(spec, 1)
        filler = ~slot.data["mask"]
        assert filler.any()
        slot.data["reward"][filler] = junk
        slot.data["logp"][filler] = -junk / 1e5
        learner.step(Batch([slot], 0))
        results.append(everything(learner))
    assert_equal(*results)


@every_objective
def test_observations_of_fillers_are_no_part_of_the_statistics(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    learner, _, spec = make(objective, normalize_obs=True)
    slot = random_slot(spec, 1)
    kept = slot.data["obs"][:-1][slot.data["mask"]].double()
    assert len(kept) < slot.data["mask"].numel()
    learner.step(Batch([slot], 0))
    assert learner.weights()["inputs.norm.count"] == len(kept)
    torch.testing.assert_close(learner.weights()["inputs.norm.mean"], kept.mean(0))


@every_objective
def test_an_update_is_made_with_the_statistics_that_acted(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    learner, policy, spec = make(objective, normalize_obs=True, **ONE_STEP)
    divergence = {"impala": "losses/approx_kl", "ppo": "losses/behaviour_kl"}[objective]
    for seed in (1, 2):
        slot = random_slot(spec, seed)
        slot.data["obs"].add_(seed)
        act_on_policy(policy, slot)
        metrics = learner.step(Batch([slot], 0)).flush()
        assert metrics[divergence] == pytest.approx(0.0, abs=1e-9)


@every_objective
def test_rewards_are_clipped_on_both_sides_after_scaling(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    settings = {"reward_scale": 0.5, "reward_clip": 1.0}
    results = []
    for by_hand in (False, True):
        learner, _, spec = make(objective, normalize_reward=False, **({} if by_hand else settings))
        slot = random_slot(spec, 1)
        raw = slot.data["reward"].mul_(4).clone()
        assert raw.min() < -2 and raw.max() > 2
        if by_hand:
            slot.data["reward"].mul_(0.5).clamp_(-1, 1)
        learner.step(Batch([slot], 0))
        assert by_hand or torch.equal(slot.data["reward"], raw)
        results.append(everything(learner))
    assert_equal(*results)


@every_objective
def test_an_episode_that_a_limit_cut_off_continues_in_its_final_observation(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    results = {}
    for end in ("none", "truncated", "terminated"):
        learner, _, spec = make(objective, normalize_reward=False)
        slot = random_slot(spec, 1)
        slot.data["terminated"].fill_(False)
        slot.data["mask"].fill_(True)
        slot.data["mask"][2, 1] = False  # the filler after the end
        if end != "none":
            slot.data[end][1, 1] = True
        learner.step(Batch([slot], 0))
        results[end] = everything(learner)
    assert_equal(results["none"], results["truncated"])
    other = results["terminated"]
    assert any(not torch.equal(value, other[name]) for name, value in results["none"].items())


def test_a_linear_entropy_bonus_falls_to_zero(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    norms = []
    for num_steps in (0, 500, 1000, 1500):  # of 1000
        learner, policy, spec = make(
            "impala", entropy_coef=0.2, entropy_schedule="linear", value_coef=0.0
        )
        slot = random_slot(spec, 1)
        slot.data["reward"].zero_()
        for parameter in policy.value_head.parameters():
            parameter.data.zero_()  # no advantage: the bonus alone has a gradient
        learner.num_steps = num_steps
        norms.append(learner.step(Batch([slot], 0)).flush()["losses/grad_norm"])
    assert norms[0] > 0 and norms[1:] == pytest.approx([norms[0] / 2, 0.0, 0.0])


@every_objective
def test_epochs_and_minibatches_learn_more_from_a_batch(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    learner, policy, spec = make(objective, batch_size=2, epochs=3, minibatches=4)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    learner.step(Batch([random_slot(spec, 1), random_slot(spec, 2)], 0))
    assert learner.version == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    optimizer: Any = learner.state_dict().optimizer
    assert {int(item["step"]) for item in optimizer["update"].values()} == {3 * 4}


@pytest.mark.parametrize("shuffle", ["pass", "batch"])
def test_every_pass_takes_each_environment_once(
    make: Callable[..., Any],
    random_slot: Callable[..., Slot],
    monkeypatch: pytest.MonkeyPatch,
    shuffle: str,
) -> None:
    learner, _, spec = make("impala", epochs=3, minibatches=2, shuffle=shuffle)
    slot = random_slot(spec, 1)
    slot.data["obs"][0, :, 0] = torch.arange(4.0)
    losses, seen = learner.objective.losses, []

    def watched(rows: UnrollRows, metrics: Metrics) -> Losses:
        seen.append({int(env) for env in rows["obs"][0, :, 0]})
        return losses(rows, metrics)

    monkeypatch.setattr(learner.objective, "losses", watched)
    learner.step(Batch([slot], 0))
    assert [len(minibatch) for minibatch in seen] == [2] * 6
    passes = zip(seen[::2], seen[1::2], strict=True)
    assert all(one | other == {0, 1, 2, 3} for one, other in passes)
    assert (seen[0] == seen[2] == seen[4]) == (shuffle == "batch")


VARIANTS: dict[str, dict[str, Any]] = {
    "minibatches": {"epochs": 2, "minibatches": 2},
    "all normalisers": {
        "normalize_obs": True,
        "normalize_reward": True,
        "normalize_advantage": True,
    },
    "lstm, adaptive step size": {
        "core": "lstm",
        "epochs": 2,
        "minibatches": 4,
        "optimizer": {"lr_schedule": "adaptive", "target_kl": 1e-4},
    },
    "rmsprop and schedules": {
        "entropy_schedule": "linear",
        "optimizer": {"name": "rmsprop", "momentum": 0.5, "lr_schedule": "linear"},
    },
    "normalised values": {"normalize_value": True},
}


@pytest.mark.parametrize(
    ("objective", "variant"),
    [
        (objective, variant)
        for objective, variant in product(("impala", "ppo"), VARIANTS)
        if objective == "ppo" or variant != "normalised values"
    ],
)
def test_a_saved_learner_continues_bit_for_bit(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str, variant: str
) -> None:
    whole, _, spec = make(objective, **VARIANTS[variant])
    batches = [Batch([random_slot(spec, seed)], seed) for seed in range(8)]
    for batch in batches[:4]:
        whole.step(batch)
    saved = whole.state_dict()
    saved.model, saved.optimizer = (
        tree_map(torch.clone, tree) for tree in (saved.model, saved.optimizer)
    )
    version, num_steps = whole.version, whole.num_steps
    for batch in batches[4:]:
        last = whole.step(batch)
    resumed, _, _ = make(objective, **VARIANTS[variant])
    resumed.load_state_dict(saved)
    resumed.version, resumed.num_steps = version, num_steps  # the runner's own part
    for batch in batches[4:]:
        again = resumed.step(batch)
    assert_equal(everything(whole), everything(resumed))
    assert last.flush() == again.flush()


@every_objective
@pytest.mark.parametrize(
    ("target_kl", "direction"), [(1e-12, -1), (1e12, 1)], ids=["too far", "not far enough"]
)
def test_an_adaptive_step_size_follows_the_divergence_within_its_bounds(
    make: Callable[..., Any],
    random_slot: Callable[..., Slot],
    objective: str,
    target_kl: float,
    direction: int,
) -> None:
    optimizer = {"lr": 1e-3, "lr_schedule": "adaptive", "target_kl": target_kl}
    learner, _, spec = make(objective, epochs=2, minibatches=2, optimizer=optimizer)
    rates = [
        learner.step(Batch([random_slot(spec, seed)], 0)).flush()["losses/learning_rate"]
        for seed in range(15)
    ]
    # Once per pass, and there are two.
    assert rates[0] == pytest.approx(1e-3 * 1.5 ** (2 * direction))
    assert rates[1] == pytest.approx(1e-3 * 1.5 ** (4 * direction))
    assert rates[-1] == (1e-2 if direction > 0 else 1e-5)


@every_objective
def test_a_step_size_adapts_to_how_far_the_policy_was_in_all_minibatches(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    def step_size(target_kl: float) -> tuple[float, float]:
        optimizer = {"lr": 1e-3, "lr_schedule": "adaptive", "target_kl": target_kl}
        learner, _, spec = make(objective, epochs=1, minibatches=4, optimizer=optimizer)
        metrics = learner.step(Batch([random_slot(spec, 1)], 0)).flush()
        return metrics["losses/approx_kl"], metrics["losses/learning_rate"]

    far, _ = step_size(1.0)
    assert far > 0
    # It falls where the policy was more than two of the target away, and not before.
    assert step_size(far / 2.02)[1] == pytest.approx(1e-3 / 1.5)
    assert step_size(far / 1.98)[1] == pytest.approx(1e-3)


@every_objective
def test_passes_over_a_batch_end_when_the_policy_went_far(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str
) -> None:
    for limit, num_epochs in ((1e-9, 2), (1e9, 5)):
        learner, _, spec = make(
            objective, minibatches=1, epochs=5, stop_kl=limit, optimizer={"lr": 1e-2}
        )
        slot = random_slot(spec, 1)
        act_on_policy(learner.policy, slot)
        # The first pass begins where the policy is: nothing is seen before the second.
        assert learner.step(Batch([slot], 0)).flush()["losses/epochs"] == num_epochs


@pytest.mark.parametrize(
    ("objective", "batch"), [("impala", "8 environments"), ("ppo", "40 steps")]
)
def test_a_batch_that_does_not_split_is_refused_with_the_nearest_that_does(
    make: Callable[..., Any], objective: str, batch: str
) -> None:
    with pytest.raises(UniRLError, match=f"batch of {batch} does not split into 3") as error:
        make(objective, batch_size=2, minibatches=3)
    assert "minibatches 4" in error.value.remedy or "minibatches 2" in error.value.remedy


@pytest.mark.parametrize("config", [ImpalaLearnerConfig, PpoLearnerConfig])
@pytest.mark.parametrize(
    "wrong",
    [
        {"gamma": 1.5},
        {"lambda_": -0.1},
        {"epochs": 0},
        {"minibatches": 0},
        {"rho_clip": -1.0},
        {"c_clip": float("nan")},
        {"pg_rho_clip": -1.0},
        {"reward_clip": -1.0},
        {"stop_kl": 0.0},
        {"device": "foo"},
        {"entropy_coef": -1.0},
    ],
    ids=str,
)
def test_settings_that_break_a_rule_are_refused_in_three_parts(
    config: type[Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(UniRLError) as error:
        config(**wrong)
    assert len(error.value.parts) == 3
    for name, value in wrong.items():
        assert f"learner.{name}" in str(error.value) and str(value) in str(error.value)


@pytest.mark.parametrize("config", [ImpalaLearnerConfig, PpoLearnerConfig])
def test_an_adaptive_step_size_needs_two_steps_on_a_batch(config: type[Any]) -> None:
    optimizer = OptimizerConfig(lr_schedule="adaptive")
    with pytest.raises(UniRLError, match=r"learner.epochs \* learner.minibatches >= 2") as error:
        config(optimizer=optimizer, epochs=1, minibatches=1)
    assert len(error.value.parts) == 3
    config(optimizer=optimizer, epochs=2, minibatches=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_that_is_asked_for_and_absent_is_an_error(make: Callable[..., Any]) -> None:
    with pytest.raises(UniRLError, match="CUDA"):
        make("ppo", device="cuda")


def test_selected_environments_are_those_asked_for_in_every_tensor() -> None:
    rows = {
        "obs": {"a": torch.arange(12).view(3, 4), "b": torch.rand(3, 4, 2)},
        "mask": torch.rand(2, 4) > 0.5,
        "state": {"h": torch.rand(4, 5)},
    }
    envs = torch.tensor([3, 1])
    selected = select(rows, envs)
    assert torch.equal(selected["obs"]["a"], torch.tensor([[3, 1], [7, 5], [11, 9]]))
    assert torch.equal(selected["obs"]["b"], rows["obs"]["b"][:, envs])  # type: ignore[index]
    assert torch.equal(selected["mask"], rows["mask"][:, envs])  # type: ignore[index]
    assert torch.equal(selected["state"]["h"], rows["state"]["h"][envs])  # type: ignore[index]


@pytest.mark.gpu
@every_objective
@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_the_learner_on_cuda_does_what_it_does_on_the_cpu_and_resumes(
    make: Callable[..., Any], random_slot: Callable[..., Slot], objective: str, name: str
) -> None:
    settings: dict[str, Any] = {
        "core": "lstm",
        "normalize_obs": True,
        "normalize_reward": True,
        "normalize_advantage": True,
        "epochs": 2,  # minibatches would be drawn in another order: the devices' generators differ
        "optimizer": {"name": name, "lr": 1e-3, "max_grad_norm": 0.5},
    }
    cpu, _, spec = make(objective, **settings)
    cuda, _, _ = make(objective, device="cuda", **settings)
    for step in range(3):
        for learner in (cpu, cuda):
            learner.step(Batch([random_slot(spec, step)], step)).flush()
    there = cuda.weights()
    for key, value in cpu.weights().items():
        torch.testing.assert_close(value, there[key].cpu(), rtol=1e-3, atol=1e-4)
    cpu.load_state_dict(cuda.state_dict())  # a checkpoint of a GPU continues on a CPU
    cpu.step(Batch([random_slot(spec, 9)], 3))

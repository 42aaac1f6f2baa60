"""What a loop continues with after a resume, beside its learner and its samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unirl
from unirl.errors import UniRLError
from unirl.runners.inline import InlineRunner
from unirl.runners.state import check_fingerprint, restore, save
from unirl.storage.checkpoint import load_checkpoint


def test_a_resume_restores_torchs_random_numbers_and_the_training_time(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **{"policy.hidden": (8,), "run.total_steps": 100})
    one, two = InlineRunner(plan), InlineRunner(plan)
    one.loop.seconds_before = 1000.0
    torch.manual_seed(5)
    path = save(one.loop, tmp_path)
    wanted = torch.rand(3)
    torch.manual_seed(6)
    restore(two.loop, load_checkpoint(path))
    assert torch.equal(torch.rand(3), wanted)
    assert two.loop.seconds >= 1000.0
    for runner in (one, two):
        runner.close()


def test_a_resume_counts_the_samples_that_were_not_finished(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **{"policy.hidden": (8,), "queue.batch_size": 2})
    one, two = InlineRunner(plan), InlineRunner(plan)
    client = one.loop.queue.join()
    slot = client.acquire()
    slot.first_version = slot.last_version = 0
    client.commit(slot)
    client.acquire()
    restore(two.loop, load_checkpoint(save(one.loop, tmp_path)))
    state = load_checkpoint(save(two.loop, tmp_path)).state
    assert state["next_ticket"] == 2 and len(state["ready"]) == 1
    assert two.loop.metrics.flush()["queue/discarded/shutdown"] == 1
    for runner in (one, two):
        runner.close()


@pytest.mark.gpu
def test_a_resume_restores_the_random_numbers_of_the_gpu(tmp_path: Path) -> None:
    """Dropout of adapters draws from them."""
    torch.zeros(1, device="cuda")
    plan = unirl.make_plan("impala", **{"policy.hidden": (8,), "run.total_steps": 100})
    runner = InlineRunner(plan)
    torch.manual_seed(5)
    path = save(runner.loop, tmp_path)
    wanted = torch.rand(3, device="cuda")
    torch.manual_seed(6)
    restore(runner.loop, load_checkpoint(path))
    assert torch.equal(torch.rand(3, device="cuda"), wanted)
    runner.close()


def test_a_checkpoint_of_a_gpu_is_resumed_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = unirl.make_plan("impala", **{"policy.hidden": (8,), "run.total_steps": 100})
    runner = InlineRunner(plan)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_initialized", lambda: True)
        gpu.setattr(torch.cuda, "device_count", lambda: 1)
        gpu.setattr(torch.cuda, "get_rng_state", lambda i: torch.arange(16, dtype=torch.uint8))
        checkpoint = load_checkpoint(save(runner.loop, tmp_path))
    rng = checkpoint.optimizer["rng"]  # type: ignore[index, call-overload]
    assert rng["cuda:0"].tolist() == list(range(16))  # type: ignore[index, call-overload, union-attr]
    restore(runner.loop, checkpoint)
    runner.close()


def test_a_checkpoint_from_before_a_setting_existed_is_resumed_while_it_means_what_it_meant(
    tmp_path: Path,
) -> None:
    small = {"policy.hidden": (8,), "run.total_steps": 100}
    usual, other = (
        unirl.make_plan("impala", **{**small, "policy.image_stride": stride}) for stride in (4, 2)
    )
    assert "image_stride" not in usual.learner.fingerprint["policy"], (
        "no checkpoint of then names it"
    )
    runner = InlineRunner(usual)
    path = save(runner.loop, tmp_path)
    runner.close()
    checkpoint = load_checkpoint(path)
    check_fingerprint(usual, usual.learner, checkpoint)
    with pytest.raises(UniRLError, match=r"policy\.image_stride = None, this run has 2"):
        check_fingerprint(other, other.learner, checkpoint)

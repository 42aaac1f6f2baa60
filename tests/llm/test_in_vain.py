"""A run whose settings discard everything ends by itself, and names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

from unirl import cli

CODE = "tests.llm.rollout_code"
RUN = (
    "train", "grpo", "--model", "tiny", "--task", "reverse", "--task.max-prompt", "16",
    "--name", "run", "--no-console", "--sampling.max-tokens", "2", "--rollout.group-size", "2",
    "--queue.batch-size", "2", "--run.total-steps", "400", "--rollout.give-up-after", "6",
)  # fmt: skip
CASES: dict[str, tuple[Sequence[str], tuple[str, ...]]] = {
    "equal rewards": (
        ("--rollout.zero-variance", "discard", "--reward.weights.exact", "1"),
        ("6 groups in a row: the rewards of each were all equal",
         "rollout.zero_variance is discard, and rollout.give_up_after is 6",
         "rollout.zero_variance to skip"),
    ),
    "a filter": (
        ("--rollout.filter", f"{CODE}:nothing"),
        ("the filter kept none", "rollout.filter says", "loosen the filter"),
    ),
    "completions cut off": (
        ("--algorithm.mask-truncated", "true", "--sampling.max-tokens", "1"),
        ("all of their completions were cut off", "algorithm.mask_truncated",
         "sampling.max_tokens"),
    ),
    "a correction": (
        ("--algorithm.correction", "icepop", "--algorithm.correction-low", "5",
         "--algorithm.correction-high", "6", "--rollout.zero-variance", "train"),
        ("the weight 0", "algorithm.correction_low .. correction_high", "widen them"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_that_learns_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags, words = CASES[case]
    assert cli.main([*RUN, *flags]) == 2
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if line]
    assert "Traceback" not in said and "error: nothing was learned of" in said
    assert len(lines[-3:]) == 3
    for word in words:
        assert word in said, said
    assert (tmp_path / "runs/run/checkpoints/latest").exists()

"""The card: all that it says is in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from unirl.errors import UniRLError
from unirl.report.card import write_card


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "pong"
    (folder / "eval").mkdir(parents=True)
    (folder / "videos").mkdir()
    (folder / "config.toml").write_text('recipe = "impala"\n\n[env]\nid = "ALE/Pong-v5"\n')
    (folder / "command.txt").write_text("unirl train impala --env.id ALE/Pong-v5\n")
    rows = [
        {"step": 1_000, "seconds": 1.0, "charts/episodic_return": 20.5},
        {"step": 9_000_000, "seconds": 3_600.0, "charts/episodic_return": 19.25},
        {"step": 9_000_100, "seconds": 3_660.0, "charts/episodic_return": None},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, mean in ((9_000_100, 19.8), (500, -21.0)):
        result = {"step": step, "deterministic": False, "return_mean": mean, "returns": [mean]}
        (folder / "eval" / f"step_{step:08d}.json").write_text(json.dumps(result))
    (folder / "eval" / "torn.json").write_text('{"step": 1')
    (folder / "curve.png").write_bytes(b"")
    (folder / "videos" / "episode.gif").write_bytes(b"")
    return folder


def test_the_card_says_what_was_trained_how_well_and_how_to_repeat_it(run_dir: Path) -> None:
    path = write_card(run_dir)
    assert path == run_dir / "README.md"
    text = path.read_text()
    for words in (
        "# IMPALA on ALE/Pong-v5\n",
        "9,000,100 environment steps in 1 h 1 min (2,459 steps/s)",
        "Training return at the end 19.2, at best 20.5.",
        "During training:\n\n| step | deterministic | return mean |\n| --- | --- | --- |\n"
        "| 500 | no | -21.00 |\n| 9,000,100 | no | 19.80 |\n",
        "![curve](curve.png)",
        "![episode](videos/episode.gif)",
        "```sh\nunirl train impala --env.id ALE/Pong-v5\n```",
        f"unirl resume {run_dir} ",
        '```toml\nrecipe = "impala"\n\n[env]\nid = "ALE/Pong-v5"\n```',
        f"| torch | {torch.__version__} |",
        "| processor | ",
    ):
        assert words in text, f"{words!r} is missing in\n{text}"


def test_the_card_shows_what_happened_to_the_members(run_dir: Path) -> None:
    rows = [{"time": 1e9, "event": "started", "member": "actor 3"}]
    rows += [{"time": 1e9, "event": "died", "member": "actor 3", "cause": "killed | by signal 9"}]
    rows += [{"time": 1e9, "event": "restarted", "member": "actor 3"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "events.jsonl").write_text(lines + '{"time": 1')
    text = write_card(run_dir).read_text()
    assert "1 died, 1 restarted" in text and "killed \\| by signal 9" in text
    (run_dir / "events.jsonl").write_text(lines.splitlines()[0])
    assert "## Events" not in write_card(run_dir).read_text()


def test_the_evaluation_with_most_episodes_comes_first(run_dir: Path) -> None:
    (run_dir / "eval" / "by_hand").mkdir()
    for name, seed, num, more in (
        ("a", 1, 20, {}),
        ("b", 1234, 100, {}),
        ("c", 1, 50, {"changes": {"env.max_episode_steps": "7"}}),
    ):
        result = {"step": 9_000_100, "seed": seed, **more, "num_episodes": num, "return_mean": 1.0}
        (run_dir / "eval" / "by_hand" / f"{name}.json").write_text(json.dumps(result))
    text = write_card(run_dir).read_text()
    table = text.partition("By `unirl eval`:\n\n")[2].partition("\n\n")[0].splitlines()
    assert table[0] == "| step | seed | num episodes | return mean | changes |"
    assert [line.split("|")[2].strip() for line in table[2:]] == ["1234", "1", "1"]
    assert [line.split("|")[5].strip() for line in table[2:]] == ["", "env.max_episode_steps 7", ""]
    assert text.index("By `unirl eval`:") < text.index("During training:")
    training = {"step": 9_000_100, "num_episodes": 400, "return_mean": 19.0}
    (run_dir / "eval" / "step_09000100.json").write_text(json.dumps(training))
    text = write_card(run_dir).read_text()
    assert text.index("During training:") < text.index("By `unirl eval`:")


def test_a_run_that_has_just_begun_has_a_card_too(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("lr = 1\n")
    text = write_card(tmp_path).read_text()
    assert text.startswith(f"# {tmp_path.name}\n")
    assert "## Evaluation" not in text and "Trained" not in text and "Reproduce" not in text


def test_writing_it_again_replaces_it(run_dir: Path) -> None:
    before = sorted(run_dir.iterdir())
    first = write_card(run_dir).read_text()
    assert write_card(run_dir).read_text() == first
    assert sorted(run_dir.iterdir()) == sorted([*before, run_dir / "README.md"])


def test_what_is_no_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match="not a run folder"):
        write_card(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("what?")
    with pytest.raises(UniRLError, match="damaged"):
        write_card(tmp_path)

"""Commands about a trained run: eval, play, plot, card."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.commands import run_folder
from unirl.commands.arguments import first, missing_run, one_run, parse, parse_with_recipe
from unirl.commands.command import NoOptions
from unirl.descendants import descendants_ended
from unirl.errors import UniRLError
from unirl.trained.trained_run import TrainedRun, check_changes, no_evaluation

if TYPE_CHECKING:
    from unirl.runners.plan import Plan


@dataclass(frozen=True)
class EpisodeOptions:
    """Flags of commands that play whole episodes."""

    episodes: int = 100
    """Episodes to play. More: a smaller error of the mean, more time."""
    deterministic: bool = False
    """Take the most probable action. Neither this nor --stochastic: as run.eval_deterministic."""
    stochastic: bool = False
    """Sample actions as in training."""
    seed: int = 1
    """Of environments and sampled actions. The same seed plays the same episodes."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UniRLError(
                f"--episodes is {self.episodes}", "--episodes >= 1 must hold", "20 or 100 are usual"
            )
        if self.seed < 0:
            raise UniRLError(f"--seed is {self.seed}", "--seed >= 0 must hold", "1 is the default")
        if self.deterministic and self.stochastic:
            raise UniRLError(
                "--deterministic and --stochastic were both given",
                "actions are either the most probable ones or sampled",
                "give one of them, or none: run.eval_deterministic decides",
            )

    def is_deterministic(self, plan: Plan) -> bool:
        """What these flags say, or else the plan."""
        if self.deterministic or self.stochastic:
            return self.deterministic
        return plan.run.eval_deterministic


@dataclass(frozen=True)
class EvalOptions(EpisodeOptions):
    """Flags of `unirl eval`."""

    json: bool = False
    """Print one JSON object instead of a line."""


@dataclass(frozen=True)
class PlayOptions(EpisodeOptions):
    """Flags of `unirl play`."""

    episodes: int = 1
    """Episodes in the video."""
    video: Path | None = None
    """File to write, .mp4 or .gif. None, or --video alone: videos/step_N.mp4 in the run folder."""


@dataclass(frozen=True)
class PlotOptions:
    """Flags of `unirl plot`."""

    out: Path | None = None
    """PNG to write (also -o). None: plot.png in the run folder, in the current one for several."""


def evaluate(arguments: Sequence[str]) -> int:
    """`unirl eval`: whole episodes with the newest checkpoint; flags change the run's config."""
    where = run_folder.find(first(arguments, "eval"))
    module, _ = run_folder.read_config(run_folder.folder_of(where))
    positional, options, changes = parse_with_recipe(arguments, EvalOptions, module.Config)
    one_run(positional, "eval")
    has_env = "env" in module.Config.__dataclass_fields__
    check_changes(changes, has_env=has_env, as_flags=True)
    from unirl.runners.evaluation import write_evaluation

    run = TrainedRun(where, changes)
    deterministic = options.is_deterministic(run.plan)
    result = run.evaluate(options.episodes, deterministic=deterministic, seed=options.seed)
    numbers: dict[str, Any] = {
        "step": run.step,
        "num_episodes": len(result.returns),
        "deterministic": deterministic,
        "seed": options.seed,
        "return_mean": result.mean,
        "return_std": result.std,
        "return_min": min(result.returns),
        "return_max": max(result.returns),
        "length_mean": sum(result.lengths) / len(result.lengths),
    }
    if not options.json:  # at once: the file may not be possible
        _print_result(numbers)
    path = write_evaluation(
        run.folder,
        run.step,
        result,
        deterministic,
        seed=options.seed,
        changes=changes,
    )
    print(json.dumps({**numbers, "file": str(path)}) if options.json else f"wrote {path}")
    return 0


def _print_result(numbers: Mapping[str, Any]) -> None:
    print(
        f"return {numbers['return_mean']:.2f} +- {numbers['return_std']:.2f}"
        f" (min {numbers['return_min']:.2f}, max {numbers['return_max']:.2f})"
        f" over {numbers['num_episodes']} episodes of {numbers['length_mean']:.0f} steps,"
        f" actions {'greedy' if numbers['deterministic'] else 'sampled'},"
        f" checkpoint of step {numbers['step']:,}"
    )


def play(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, PlayOptions, alone={"video": "none"})
    where = run_folder.find(one_run(positional, "play"))
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        # Without a display, these draw into memory; what the user set counts.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")
    plan, checkpoint = run_folder.load(where)
    from unirl.core.evaluator import WatchableEvaluator
    from unirl.report.video import write_video

    if plan.learner.make_evaluator is None:
        raise no_evaluation(plan, "shown as a video")
    player = plan.learner.make_evaluator(options.seed)
    if not isinstance(player, WatchableEvaluator):
        player.close()
        raise UniRLError(
            f'recipe "{plan.recipe}" cannot be shown as a video',
            "what it evaluates has returns and lengths, and no pictures",
            f"unirl eval {where} gives the returns; a language run keeps texts in samples/",
        )
    usual = run_folder.folder_of(where) / "videos" / f"step_{checkpoint.step:08d}.mp4"
    path = options.video or usual
    # Around both: what draws is ended with its pictures, and must not take the encoder with it.
    with descendants_ended(), closing(player):
        frames = player.frames(
            plan.learner.weights_in(checkpoint.model),
            deterministic=options.is_deterministic(plan),
            num_episodes=options.episodes,
        )
        beginning = next(frames)  # the speed is known once there is a picture
        write_video(itertools.chain([beginning], frames), path, player.frames_per_second)
    print(f"wrote {path}")
    return 0


def plot(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, PlotOptions, short={"-o": "out"})
    if not positional:
        raise missing_run("plot")
    runs = [run_folder.folder_of(run_folder.find(word)) for word in positional]
    from unirl.report.plots import plot_runs

    out = options.out or (runs[0] / "plot.png" if len(runs) == 1 else Path("plot.png"))
    if out.suffix.lower() != ".png":
        raise UniRLError(
            f'"{out}" is no PNG file', "--out ends in .png", f"try --out {out.with_suffix('.png')}"
        )
    plot_runs(runs, out)
    print(f"wrote {out}")
    return 0


def card(arguments: Sequence[str]) -> int:
    positional, _ = parse(arguments, NoOptions)
    run_dir = run_folder.folder_of(run_folder.find(one_run(positional, "card")))
    from unirl.report.card import write_card

    print(f"wrote {write_card(run_dir)}")
    return 0

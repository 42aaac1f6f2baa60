"""What recipes over environments choose by their kind: networks, losses and their settings.

Figures behind it: benchmarks/RESULTS.md, plain commands.
"""

from __future__ import annotations

from typing import Any

from unirl.recipes.defaults import Choices


def choose_learning(choices: Choices, num_envs: int, length: int) -> None:
    """num_envs, length: of a batch."""
    if choices.kind.images:
        _from_images(choices)
    elif choices.kind.continuous:
        _continuous(choices)
    else:
        _discrete(choices)
    if choices.kind.family == "box2d":
        far: dict[str, Any] = {"learner.gamma": 0.999, "learner.lambda_": 0.98}
        if choices["policy.core"] == "none" and not choices["policy.module"]:
            far["policy.shared_torso"] = False
        choices.choose("episodes of a thousand steps are decided at their end", far)
    clip = choices["learner.policy_clip"]
    steps = clip is not None and choices["policy.core"] == "none"
    choose_minibatches(choices, choices["learner.minibatches"], num_envs * (length if steps else 1))


def _from_images(choices: Choices) -> None:
    own = bool(choices["policy.module"])  # of which torso and images say nothing
    if choices["policy.torso"] == "auto" and not own:
        choices.choose(
            "half the cost of the Nature CNN; bfloat16 where the CPU multiplies it",
            {"policy.torso": "shallow", "policy.feature_size": 256, "policy.compute_dtype": "auto"},
        )
    if choices["policy.torso"] != "mlp" and not own:
        choices.choose(
            "what is small on a still background is learned several times faster",
            {"policy.normalize_images": True, "policy.pixel_min_std": 32.0},
        )
    _passes(choices, 2, 16, "two clipped passes in small minibatches")
    choices.choose(
        "larger steps and more chance than usual, for whitened pixels",
        {
            "learner.optimizer.lr": 5e-4,
            "learner.entropy_coef": 0.015,
            "learner.entropy_schedule": "linear",
        },
    )


def _continuous(choices: Choices) -> None:
    if choices["policy.core"] == "none" and not choices["policy.module"]:
        choices.choose(
            "values and torques do not pull at the same features", {"policy.shared_torso": False}
        )
    _whiten(choices)
    _passes(choices, 4, 4, "four clipped passes over each batch")
    choices.choose(
        "deviations explore by themselves; small steps",
        {"learner.entropy_coef": 0.0, "learner.optimizer.lr": 3e-4},
    )
    if choices.kind.family == "mujoco" and choices["learner.policy_clip"] is not None:
        choices.choose(
            "small first actions, advantages as large as they are: robots stay on their feet",
            {"policy.initial_std": 0.4, "learner.normalize_advantage": False},
        )


def _discrete(choices: Choices) -> None:
    many = choices.kind.stepping == "vectorised"
    if not choices.kind.is_small and not choices["policy.module"]:
        choices.choose("observations are long", {"policy.hidden": (128, 128)})
    if not many:
        _whiten(choices)
    if choices.kind.stepping in ("slow", "waiting"):
        _passes(choices, 8, 4, "samples are dear: many clipped passes")
    else:
        # Many environments make large batches: as many steps of the optimiser for all of them.
        counts = (2, 8) if many else (4, 4)
        _passes(choices, *counts, "clipped passes need fewer samples")
    choices.choose(
        "small networks take large steps", {"learner.optimizer.lr": 2e-3 if many else 1e-3}
    )


def _whiten(choices: Choices) -> None:
    if choices.kind.unscaled:
        choices.choose("observations have any scale", {"policy.normalize_obs": True})


def _passes(choices: Choices, epochs: int, minibatches: int, why: str) -> None:
    """Clip, passes and minibatches belong together: one set by hand leaves the clip alone."""
    together: dict[str, Any] = {"learner.epochs": epochs, "learner.minibatches": minibatches}
    by_hand = choices.is_given("learner.epochs", "learner.minibatches")
    if choices["learner.policy_clip"] is None and not by_hand:
        together["learner.policy_clip"] = 0.2
    choices.choose(why, together)
    scale: dict[str, Any] = {"learner.lambda_": 0.95, "learner.normalize_reward": True}
    if choices["learner.policy_clip"] is not None:
        scale["learner.normalize_advantage"] = True
    choices.choose("one scale, whatever the environment's rewards", scale)
    choices.choose(
        "steps get smaller, so that the last weights are steady",
        {"learner.optimizer.lr_schedule": "linear"},
    )


def choose_minibatches(choices: Choices, minibatches: int, pieces: int) -> None:
    """At most so many minibatches that a batch splits into them evenly."""
    most = max(n for n in range(1, minibatches + 1) if pieces % n == 0)
    choices.choose(f"a batch of {pieces} splits evenly", {"learner.minibatches": most})

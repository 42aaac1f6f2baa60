"""Whitened images: equal to the formula in every layout, and the same in actors and learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.policy.pixel_norm import MAX_ROWS, PixelNorm, few_rows

ACTIONS = spaces.Discrete(3)
MIN_STD = 12.0


def pixels(num_rows: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_rows, *shape), dtype=torch.uint8, generator=generator)


def channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def formula(x: Tensor, seen: Tensor) -> Tensor:
    mean, var = seen.double().mean(0), seen.double().var(0, unbiased=False)
    return (x.double() - mean) / (var + MIN_STD**2).sqrt()


def test_before_anything_is_seen_pixels_are_scaled() -> None:
    norm, x = PixelNorm((2, 5, 4), MIN_STD), pixels(3, 2, 5, 4)
    rubbish = torch.zeros(3, dtype=torch.bool)
    norm.update(x.float(), rubbish)
    torch.testing.assert_close(norm(channels_last(x, torch.float32)), x / 255)


def test_whitened_images_equal_the_formula_however_they_came() -> None:
    norm, seen, x = PixelNorm((2, 5, 4), MIN_STD), pixels(40, 2, 5, 4), pixels(7, 2, 5, 4, seed=1)
    seen[:, :, 0] = 87  # a background that never changes
    masked = torch.cat([seen, torch.full_like(seen[:5], 255)])
    mask = torch.arange(45) < 40
    for chunk, own in zip(masked.split(9), mask.split(9), strict=True):
        norm.update(chunk.float(), own)
    out = norm(channels_last(x, torch.float32))
    torch.testing.assert_close(out.double(), formula(x, seen), atol=1e-5, rtol=1e-5)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_in_bfloat16_the_background_does_not_swallow_a_small_difference() -> None:
    norm, seen = PixelNorm((1, 4, 4), MIN_STD), torch.full((50, 1, 4, 4), 87, dtype=torch.uint8)
    seen[0] = 200
    norm.update(seen.float(), None)
    x = torch.arange(80, 96, dtype=torch.uint8).reshape(1, 1, 4, 4)
    out = norm(channels_last(x, torch.bfloat16)).float().flatten()
    steps = out[1:] - out[:-1]
    # Sixteen neighbouring levels stay evenly apart: no step is lost or doubled.
    assert steps.min() > 0.9 * steps.mean() and steps.max() < 1.1 * steps.mean()


def test_a_large_batch_is_seen_in_part_evenly() -> None:
    num_steps, num_envs = 64, 32
    rows = few_rows(torch.empty(num_steps * num_envs, 1))
    assert len(set(rows.tolist())) == MAX_ROWS
    assert rows.min() >= 0 and rows.max() < num_steps * num_envs
    # Rows are time-major: neither one environment nor one time stands for all.
    assert len({row % num_envs for row in rows.tolist()}) > 0.8 * num_envs
    assert len({row // num_envs for row in rows.tolist()}) > 0.8 * num_steps
    assert few_rows(torch.empty(5, 1)).tolist() == [0, 1, 2, 3, 4]


LAYOUTS = {
    "HW": ((40, 44), lambda x: x[:, None]),
    "CHW": ((4, 40, 44), lambda x: x),
    "HWC": ((40, 44, 3), lambda x: x.permute(0, 3, 1, 2)),
    "SCHW": ((2, 3, 40, 44), lambda x: x.flatten(1, 2)),
    "SHWC": ((2, 40, 44, 3), lambda x: x.permute(0, 1, 4, 2, 3).flatten(1, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_whitens_every_layout(layout: str) -> None:
    shape, to_chw = LAYOUTS[layout]
    space = spaces.Box(0, 255, shape, np.uint8)
    config = PolicyConfig(
        normalize_images=True, pixel_min_std=MIN_STD, torso="impala", feature_size=8
    )
    policy = Policy(space, ACTIONS, config, seed=0)
    seen, x = pixels(12, *shape), pixels(3, *shape, seed=1)
    # As an unroll [T, B] with its bootstrap row, which does not count.
    unroll = torch.cat([seen.reshape(3, 4, *shape), x[:1].expand(4, *shape)[None]])
    policy.update_normalizer(unroll, torch.ones(3, 4, dtype=torch.bool))
    (image,) = policy.inputs(x).images
    expected = formula(to_chw(x), to_chw(seen))
    torch.testing.assert_close(image.double(), expected, atol=1e-5, rtol=1e-5)


def test_images_of_fillers_are_no_part_of_the_statistics() -> None:
    space = spaces.Box(0, 255, (4, 40, 44), np.uint8)
    config = PolicyConfig(normalize_images=True, pixel_min_std=MIN_STD, torso="impala")
    policy = Policy(space, ACTIONS, config, seed=0)
    seen, x = pixels(12, 4, 40, 44), pixels(3, 4, 40, 44, seed=1)
    mask = torch.arange(12).reshape(3, 4) % 3 != 1
    policy.update_normalizer(seen.reshape(3, 4, 4, 40, 44), mask)
    (image,) = policy.inputs(x).images
    expected = formula(x, seen[mask.flatten()])
    torch.testing.assert_close(image.double(), expected, atol=1e-5, rtol=1e-5)


def test_blocks_of_pixels_are_whitened_as_pixels_are() -> None:
    """What the Nature CNN reads is in another order, and the same."""
    space = spaces.Box(0, 255, (2, 40, 44), np.uint8)
    policy = Policy(
        space, ACTIONS, PolicyConfig(normalize_images=True, pixel_min_std=MIN_STD), seed=0
    )
    seen, x = pixels(12, 2, 40, 44), pixels(3, 2, 40, 44, seed=1)
    policy.update_normalizer(seen.reshape(3, 4, 2, 40, 44), torch.ones(3, 4, dtype=torch.bool))
    (image,) = policy.inputs(x).images
    expected = formula(x, seen).reshape(3, 2, 10, 4, 11, 4).permute(0, 1, 3, 5, 2, 4)
    expected = expected.reshape(3, 32, 10, 11)
    torch.testing.assert_close(image.double(), expected, atol=1e-5, rtol=1e-5)


def test_actors_get_the_statistics_as_weights() -> None:
    space = spaces.Box(0, 255, (4, 40, 40), np.uint8)
    config = PolicyConfig(normalize_images=True, compute_dtype="bfloat16")
    learner, actor = (Policy(space, ACTIONS, config, seed=seed) for seed in (0, 1))
    x = pixels(6, 4, 40, 40)
    before = learner.unroll(x[None], {}).value
    learner.update_normalizer(x[None], torch.ones(1, 6, dtype=torch.bool))
    actor.load_weights(learner.weights())
    acting, learning = (policy.unroll(x[None], {}) for policy in (actor, learner))
    assert torch.equal(acting.value, learning.value) and not torch.equal(learning.value, before)


@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (spaces.Box(-1, 1, (5,)), {}),
        (spaces.Box(0, 1, (3, 40, 40)), {"torso": "nature"}),
        (spaces.Box(0, 255, (3, 40, 40), np.uint8), {"torso": "mlp"}),
    ],
    ids=["numbers", "float image", "image read as numbers"],
)
def test_without_an_image_to_whiten_it_is_refused(
    space: spaces.Space[Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(UniRLError, match="normalize_images has nothing to normalise"):
        Policy(space, ACTIONS, PolicyConfig(normalize_images=True, **settings), seed=0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_deviation_that_divides_by_zero_is_refused(wrong: float) -> None:
    with pytest.raises(UniRLError, match=r"policy.pixel_min_std is .* must be > 0"):
        PolicyConfig(pixel_min_std=wrong)

"""From an observation tree to what networks read: images, and one vector of everything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unirl.core.tree import Path, leaf_at
from unirl.errors import UniRLError
from unirl.policy.blocks import BLOCK, to_blocks
from unirl.policy.config import PolicyConfig
from unirl.policy.normalize import RunningNorm
from unirl.policy.pixel_norm import PixelNorm, few_rows

ImageLayout = Literal["HW", "CHW", "HWC", "SCHW", "SHWC"]

IMAGE_TORSOS = ("nature", "shallow", "impala")
MAX_ONE_HOT = 512
"""Discrete observations with more values are embedded: one-hot rows would dominate the memory."""
EMBEDDING_SIZE = 64


class Inputs(NamedTuple):
    """N rows of observations in the compute dtype."""

    images: list[Tensor]
    """[N, C, H, W] each, channels_last; pixel values as they are, or whitened."""
    vector: Tensor | None
    """[N, D], or None when everything is an image."""


@dataclass(frozen=True)
class ImageLeaf:
    """Where an image is in the tree, the order of its axes, and what the networks get."""

    path: Path
    layout: ImageLayout
    channels: int
    height: int
    width: int
    scale: float
    """1/255 for uint8, else 1. Multiplied into the first convolution's weight: fewer numbers. 1
    too where a PixelNorm scales.
    """
    whitened: bool = False
    blocked: bool = False
    """Networks get blocks of pixels, see to_blocks. height, width and channels are the image's."""
    stride: int = 4
    """Of the first convolution, where the torso has one with a stride."""

    @property
    def read_shape(self) -> tuple[int, int, int]:
        """Of what `read` makes of one row."""
        if not self.blocked:
            return self.channels, self.height, self.width
        return self.channels * BLOCK**2, self.height // BLOCK, self.width // BLOCK

    def read(self, obs: Any, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        """[N, ...] -> [N, C, H, W] of `dtype`, unscaled: bfloat16 holds 0..255 exactly.

        Blocked: [N, C * 16, H / 4, W / 4]. rows: only these, int64 [M].
        """
        x = leaf_at(obs, self.path)
        x = x if rows is None else x[rows]
        if self.layout in ("HWC", "SHWC"):
            # A stack of colour frames becomes S * C channels.
            x = x if self.layout == "HWC" else x.permute(0, 2, 3, 1, 4).flatten(3)
            return x.permute(0, 3, 1, 2).to(dtype)
        if self.layout == "SCHW":
            x = x.flatten(1, 2)
        if self.layout == "HW":
            x = x.unsqueeze(1)
        if self.blocked:
            return to_blocks(x).to(dtype)
        # Interleave while a pixel is one byte; for few channels stack is the fastest transpose.
        return torch.stack(x.unbind(1), dim=-1).permute(0, 3, 1, 2).to(dtype)


@dataclass(frozen=True)
class FloatLeaf:
    """Numbers that enter the vector as they are (uint8: scaled to 0..1)."""

    path: Path
    size: int
    scale: float
    normalized: bool

    def read(self, obs: Any) -> Tensor:
        """[N, ...] -> float32 [N, size]."""
        x = leaf_at(obs, self.path)
        x = x.reshape(x.shape[0], self.size).float()
        return x if self.scale == 1.0 else x * self.scale


class IndexLeaf(nn.Module):
    """Discrete and MultiDiscrete observations, counted from 0: one-hot, or embedded if too many.

    Embeddings are drawn normal with standard deviation 1 / sqrt(EMBEDDING_SIZE).
    """

    offset: Tensor

    def __init__(self, path: Path, nvec: np.ndarray[Any, Any], generator: torch.Generator) -> None:
        super().__init__()
        self.path = path
        sizes = torch.as_tensor(nvec.reshape(-1).astype(np.int64))
        self.register_buffer("offset", torch.cumsum(sizes, 0) - sizes, persistent=False)
        self.num_values = int(sizes.sum())
        self.table: nn.Parameter | None = None
        self.size = self.num_values
        if self.num_values > MAX_ONE_HOT:
            table = torch.randn(self.num_values, EMBEDDING_SIZE, generator=generator)
            self.table = nn.Parameter(table * EMBEDDING_SIZE**-0.5)
            self.size = EMBEDDING_SIZE * len(sizes)

    def read(self, obs: Any) -> Tensor:
        """int [N] or [N, ...] -> float32 [N, size]."""
        x = leaf_at(obs, self.path)
        index = x.reshape(x.shape[0], -1).long() + self.offset
        if self.table is not None:
            return nn.functional.embedding(index, self.table).flatten(1)
        one_hot = torch.zeros(index.shape[0], self.num_values, device=index.device)
        return one_hot.scatter_(1, index, 1.0)


class ObservationInputs(nn.Module):
    """Reads trees of one observation space; owns the normalisers of numbers and of images."""

    norm: RunningNorm | None

    def __init__(
        self, space: gymnasium.Space[Any], config: PolicyConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
        self.images: list[ImageLeaf] = []
        self.floats: list[FloatLeaf] = []
        indices: list[IndexLeaf] = []
        for path, leaf in space_leaves(space):
            if isinstance(leaf, spaces.Discrete):
                indices.append(IndexLeaf(path, np.array([leaf.n]), generator))
            elif isinstance(leaf, spaces.MultiDiscrete):
                indices.append(IndexLeaf(path, leaf.nvec, generator))
            elif isinstance(leaf, spaces.MultiBinary):
                self.floats.append(FloatLeaf(path, int(np.prod(leaf.shape)), 1.0, False))
            elif isinstance(leaf, spaces.Box):
                self._add_box(path, leaf, config)
            else:
                raise UniRLError(
                    f"observation space {leaf} at {_name(path)} is not supported",
                    "known: Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these",
                    "convert it with a gymnasium observation wrapper",
                )
        self.indices = nn.ModuleList(indices)
        # Normalised numbers come first in the vector, so that one statistics object covers them.
        self.floats.sort(key=lambda leaf: not leaf.normalized)
        self.num_normalized = sum(leaf.size for leaf in self.floats if leaf.normalized)
        self.vector_size = sum(leaf.size for leaf in self.floats)
        self.vector_size += sum(leaf.size for leaf in indices)
        if not self.images and not self.vector_size:
            raise UniRLError(
                f"observation space {space} is empty", "a policy needs at least one number to read"
            )
        if config.torso in IMAGE_TORSOS and not self.images:
            raise UniRLError(
                f"policy.torso {config.torso!r} has no image to read in {space}",
                "image torsos read Boxes of 3 dimensions, or uint8 Boxes of 2 to 4",
                "set policy.torso to mlp",
            )
        self.norm = None
        if config.normalize_obs:
            if not self.num_normalized:
                raise UniRLError(
                    f"policy.normalize_obs has nothing to normalise in {space}",
                    "it applies to float Boxes that are not read as images",
                    "set policy.normalize_obs to false (uint8 is scaled to 0..1 anyway)",
                )
            self.norm = RunningNorm((self.num_normalized,), clip=config.obs_clip)
        self.pixel_norms = nn.ModuleList(
            PixelNorm(image.read_shape, config.pixel_min_std)
            for image in self.images
            if image.whitened
        )
        if config.normalize_images and not self.pixel_norms:
            raise UniRLError(
                f"policy.normalize_images has nothing to normalise in {space}",
                "it applies to uint8 Boxes that are read as images",
                "set policy.normalize_images to false, or lower policy.image_stride if images are"
                " too small for the torso",
            )

    @property
    def has_statistics(self) -> bool:
        return self.norm is not None or len(self.pixel_norms) > 0

    def forward(self, obs: Any) -> Inputs:
        """Observation tree of [N, ...] leaves -> images and vector in the compute dtype."""
        images = [leaf.read(obs, self.dtype) for leaf in self.images]
        for i, norm in self._whitened():
            images[i] = norm(images[i])
        if not self.vector_size:
            return Inputs(images, None)
        columns = []
        if self.num_normalized:
            x = self._normalized(obs)
            columns.append(x if self.norm is None else self.norm.normalize(x))
        columns += [leaf.read(obs) for leaf in self.floats if not leaf.normalized]
        columns += [leaf.read(obs) for leaf in self.indices]  # type: ignore[operator]
        vector = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return Inputs(images, vector.to(self.dtype))

    def update(self, obs: Any, mask: Tensor | None) -> None:
        """Merge rows [N, ...] where mask [N] is true into the normalisers, where there are any."""
        if self.norm is not None:
            self.norm.update(self._normalized(obs), mask)
        for i, norm in self._whitened():
            image = self.images[i]
            rows = few_rows(leaf_at(obs, image.path))
            norm.update(image.read(obs, torch.float32, rows), None if mask is None else mask[rows])

    def _whitened(self) -> Iterator[tuple[int, PixelNorm]]:
        indices = (i for i, image in enumerate(self.images) if image.whitened)
        yield from zip(indices, self.pixel_norms, strict=True)

    def _normalized(self, obs: Any) -> Tensor:
        columns = [leaf.read(obs) for leaf in self.floats if leaf.normalized]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def _add_box(self, path: Path, box: spaces.Box, config: PolicyConfig) -> None:
        scale = 1.0 / 255.0 if box.dtype == np.uint8 else 1.0
        if config.torso != "mlp" and (image := _image(path, box, scale)) is not None:
            torso = "nature" if config.torso == "auto" else config.torso
            least = smallest_image(torso, config.image_stride)
            big_enough = min(image.height, image.width) >= least
            if big_enough and (config.torso != "auto" or box.dtype == np.uint8):
                whitened = config.normalize_images and box.dtype == np.uint8
                image = replace(
                    image,
                    whitened=whitened,
                    scale=1.0 if whitened else image.scale,
                    stride=config.image_stride,
                )
                self.images.append(replace(image, blocked=_can_block(image, box, torso)))
                return
            if config.torso != "auto":
                can_lower = torso != "impala" and config.image_stride > 1
                lower = "lower policy.image_stride, " if can_lower else ""
                raise UniRLError(
                    f"image {box.shape} at {_name(path)} is too small for policy.torso {torso!r}",
                    f"height and width must be >= {least}",
                    f"{lower}enlarge it (Atari: env.frame_size), or set policy.torso to mlp",
                )
        is_float = np.issubdtype(np.dtype(box.dtype), np.floating)
        self.floats.append(FloatLeaf(path, int(np.prod(box.shape)), scale, bool(is_float)))


def space_leaves(
    space: gymnasium.Space[Any], path: Path = ()
) -> Iterator[tuple[Path, gymnasium.Space[Any]]]:
    """Every leaf of a Dict / Tuple space with the path of its observations in the tree."""
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from space_leaves(child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from space_leaves(child, (*path, str(index)))
    else:
        yield path, space


def smallest_image(torso: str, stride: int) -> int:
    return {"nature": 9 * stride, "shallow": 5 * stride, "impala": 8}[torso]


def _can_block(image: ImageLeaf, box: spaces.Box, torso: str) -> bool:
    """Whether the torso begins with a convolution of 8 x 8 with stride 4, and blocks divide up the
    image.
    """
    planes = box.dtype == np.uint8 and image.layout in ("HW", "CHW", "SCHW")
    fits = image.height % BLOCK == 0 and image.width % BLOCK == 0 and image.stride == BLOCK
    return torso in ("nature", "shallow") and planes and fits


def _image(path: Path, box: spaces.Box, scale: float) -> ImageLeaf | None:
    shape = box.shape
    if box.dtype == np.uint8 and len(shape) == 2:
        return ImageLeaf(path, "HW", 1, *shape, scale)
    if len(shape) == 3:
        # The channel axis is the shorter of the two outer ones.
        if shape[2] < shape[0]:
            return ImageLeaf(path, "HWC", shape[2], shape[0], shape[1], scale)
        return ImageLeaf(path, "CHW", *shape, scale)
    if box.dtype == np.uint8 and len(shape) == 4:
        if shape[3] < shape[1]:
            return ImageLeaf(path, "SHWC", shape[0] * shape[3], shape[1], shape[2], scale)
        return ImageLeaf(path, "SCHW", shape[0] * shape[1], shape[2], shape[3], scale)
    return None


def _name(path: Path) -> str:
    return repr("/".join(path)) if path else "the root"

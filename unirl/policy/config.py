"""The choices a user makes about a policy's networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from unirl.errors import UniRLError
from unirl.imports import is_own

TorsoName = Literal["auto", "mlp", "nature", "shallow", "impala"]
ActivationName = Literal["tanh", "relu", "elu"]
CoreName = Literal["none", "lstm", "gru", "own"]
ComputeDtypeName = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class PolicyConfig:
    """Networks of one policy: observation torso, optional recurrent core, heads."""

    module: str = ""
    """module:Class of a network of your own, a torch.nn.Module (unirl/policy/own/network.py): it
    stands for the torso, or for torso and heads. torso, hidden, activation, feature_size,
    image_stride and normalize_images are not read then, and it computes in float32.
    """
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Given to policy.module when it is made, behind the two spaces."""
    torso: TorsoName = "auto"
    """What reads images. auto: nature for uint8 images of at least 9 strides (36 x 36), mlp for
    everything else. shallow costs less than half of nature, impala several times as much.
    """
    image_stride: int = 4
    """Of the first convolution of nature and shallow, whose kernel is twice as wide. Less: smaller
    things and images can be read, and what follows costs more, with its inverse square. 2 on half
    the env.frame_size: the layers of 4 on the whole one, for less.
    """
    hidden: tuple[int, ...] = field(default=(64, 64), metadata={"common": True})
    """Widths of the MLP over vectors. Wider or deeper: more capacity, slower acting and learning.
    """
    activation: ActivationName = "tanh"
    """Of the MLP (image torsos always use relu). tanh is bounded; relu is cheaper in wide layers;
    elu is usual for robots.
    """
    feature_size: int = 512
    """Outputs of an image torso's linear layer. Growing it grows the largest weight matrix with it.
    """
    core: CoreName = "none"
    """Memory between steps. lstm and gru cost one sequential step per row of an unroll. own: that
    of policy.module.
    """
    core_size: int = 128
    """Width of the recurrent state. Its weights grow with the square."""
    shared_torso: bool = True
    """False gives the value function a torso of its own: twice the learning cost, no conflict of
    gradients.
    """
    critic_group: str = ""
    """Entry of a Dict observation that the value function reads instead of the others, which are
    the actor's alone: what only a simulator knows. Needs shared_torso = false. "": no such entry.
    """
    initial_std: float = 1.0
    """Of Gaussian actions, before learning. More: wider exploration, noisier first returns."""
    normalize_obs: bool = False
    """Whiten float observations by running statistics."""
    normalize_images: bool = False
    """Whiten each pixel of uint8 images by running statistics; false: they are scaled to 0..1.
    What small things on a still background do is learned several times faster.
    """
    pixel_min_std: float = 4.0
    """With normalize_images, levels of 255 that are added, in squares, to every pixel's deviation.
    Less: pixels that hardly ever change become louder than others. More: the same thing is nearly
    equally loud wherever it is, and weaker.
    """
    obs_clip: float = field(default=10.0, metadata={"infinite": True})
    """Bound, in standard deviations, on a normalised observation. More lets rare outliers through.
    """
    compute_dtype: ComputeDtypeName = "float32"
    """bfloat16 halves memory traffic of torsos and core; heads, log_std and statistics stay
    float32. auto: bfloat16 where every device that acts or learns multiplies it natively; elsewhere
    it is many times slower. It gains nothing on small networks over vectors.
    """

    def __post_init__(self) -> None:
        for name, names in (
            ("torso", TorsoName),
            ("activation", ActivationName),
            ("core", CoreName),
            ("compute_dtype", ComputeDtypeName),
        ):
            value, known = getattr(self, name), get_args(names)
            if value not in known:
                rule = f"known: {', '.join(known)}"
                raise UniRLError(f"policy.{name} {value!r} is unknown", rule, "choose one")
        self._check_module()
        if any(width < 1 for width in self.hidden):
            raise _below("hidden", self.hidden, "every width must be >= 1")
        for name in ("image_stride", "feature_size", "core_size"):
            if getattr(self, name) < 1:
                raise _below(name, getattr(self, name), "must be >= 1")
        for name in ("initial_std", "pixel_min_std", "obs_clip"):
            if not getattr(self, name) > 0:
                raise _below(name, getattr(self, name), "must be > 0")
        if self.critic_group and self.shared_torso:
            raise UniRLError(
                f"policy.critic_group is {self.critic_group!r} and the torso is shared",
                "what only the value function sees cannot go through the actor's torso",
                "set policy.shared_torso to false",
            )
        if self.core != "none" and not self.shared_torso:
            raise UniRLError(
                f"policy.core {self.core!r} with a separate value torso",
                "a recurrent core needs shared_torso = true: actors carry one state, not two",
                "set policy.shared_torso to true or policy.core to none",
            )

    def _check_module(self) -> None:
        if self.module and not is_own(self.module):
            raise UniRLError(
                f"policy.module is {self.module!r}",
                "it must be module:Class, a class of torch.nn.Module of your own",
                "such as --policy.module my_networks:Mine",
            )
        for name, is_set in (("kwargs", bool(self.kwargs)), ("core", self.core == "own")):
            if is_set and not self.module:
                raise UniRLError(
                    f"policy.{name} is {getattr(self, name)} and has no effect",
                    "it is for a network of your own, and policy.module is empty",
                    f"leave policy.{name} out, or set policy.module to module:Class",
                )
        if self.module and self.compute_dtype == "bfloat16":
            raise UniRLError(
                "policy.compute_dtype is bfloat16 and policy.module is set",
                "a network of your own gets float32, and has float32 parameters",
                "leave policy.compute_dtype out; torch.autocast may be used in its forward",
            )


def _below(name: str, value: Any, rule: str) -> UniRLError:
    return UniRLError(f"policy.{name} is {value}", rule, "raise it")

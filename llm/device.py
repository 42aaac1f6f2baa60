"""Which device a setting names."""

from __future__ import annotations

from unirl.device import device_name, device_of_rank, usable_device
from unirl.host import local_rank


def device_of(name: str, setting: str) -> str:
    """The device that `setting` names; auto: cuda where there is one, else cpu. Under torchrun cuda
    is the one of this process' own rank: engines, reward models and learner of all processes would
    otherwise meet on the first.

    Raises UniRLError for a CUDA device that is not there.
    """
    return device_of_rank(str(usable_device(setting, device_name(name))), local_rank())

"""Parameters of which each process holds a part (DTensors, as FSDP makes them): the part, the whole
of it, and the part of a whole.

Ordinary parameters pass through. `whole` is called by all processes, in one order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_part(parameter: Tensor) -> bool:
    """Whether other processes hold the rest of it."""
    # By its method: the class of DTensor brings a second of imports along.
    return hasattr(parameter, "to_local")


def own_part(parameter: Any) -> Tensor:
    """What this process holds: the same memory, without gradient."""
    detached = parameter.detach()
    part: Tensor = detached.to_local() if is_part(parameter) else detached
    return part


def whole(parameter: Any, part: Tensor | None = None) -> Tensor:
    """The parameter in full; or another tensor divided as it is, of which this is a part."""
    if not is_part(parameter):
        return parameter.detach() if part is None else part
    if part is None:
        full: Tensor = parameter.detach().full_tensor()
        return full
    from torch.distributed.tensor import DTensor

    divided = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return divided.full_tensor()


def part_of(parameter: Any, full: Tensor) -> Tensor:
    """This process' part of a tensor that is divided as the parameter is; nobody is asked."""
    if not is_part(parameter):
        return full
    from torch.distributed.tensor import distribute_tensor

    divided: Any = distribute_tensor(
        full.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    part: Tensor = divided.to_local()
    return part

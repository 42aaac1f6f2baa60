"""Parameters that are divided among processes (DTensors, as FSDP makes them): this process' shard,
the full tensor, and the shard of a full tensor. Ordinary parameters pass through.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(parameter: Tensor) -> bool:
    """Whether other processes hold the rest of it."""
    # By its method: the class of DTensor brings a second of imports along.
    return hasattr(parameter, "to_local")


def local_shard(parameter: Any) -> Tensor:
    """What this process holds: the same memory, without gradient."""
    detached = parameter.detach()
    shard: Tensor = detached.to_local() if is_sharded(parameter) else detached
    return shard


def full_tensor(parameter: Any, shard: Tensor | None = None) -> Tensor:
    """The parameter in full; or another tensor divided as it is, of which this is a shard. All
    processes call it, in one order.
    """
    if not is_sharded(parameter):
        return parameter.detach() if shard is None else shard
    divided = parameter.detach()
    if shard is not None:
        from torch.distributed.tensor import DTensor

        divided = DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    full: Tensor = divided.full_tensor()
    return full


def shard_of(parameter: Any, full: Tensor) -> Tensor:
    """This process' shard of a tensor that is divided as the parameter is; nobody is asked."""
    if not is_sharded(parameter):
        return full
    from torch.distributed.tensor import distribute_tensor

    divided: Any = distribute_tensor(
        full.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    shard: Tensor = divided.to_local()
    return shard

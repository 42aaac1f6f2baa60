"""A language model divided among the processes that train it (FSDP2, torch's fully_shard): each
holds a shard of every weight, and gets the rest of a layer while it computes it.

Zhao et al., PyTorch FSDP, arXiv 2304.11277. What is not in a decoder layer (embedding, last norm,
output layer, critic) belongs to the policy's own group. The policy is the root, not the model of
transformers: packed training calls the decoder and reads the output layer's weight itself, all
within the policy's forward, so that whatever it touches is whole from there to the end of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.learners.sharded import full_tensor
from unirl.llm.models.lora import published_weights
from unirl.llm.training.language_policy import LanguagePolicy
from unirl.llm.training.packed_attention import decoder_of
from unirl.llm.training.packed_layout import Row, lay_out
from unirl.llm.training.packing import Pack


def shard(policy: LanguagePolicy, ranks: Ranks) -> None:
    """Divide a policy in place. What learns is held in float32 and computed in the model's dtype;
    gradients are sums over the processes. Raises UniRLError when the model has no list of layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    decoder, compute = decoder_of(policy.model), policy.compute_dtype
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UniRLError(
            f"model.shard with {type(decoder).__name__}",
            "the layers of a model are divided one by one, and it has no list of them",
            "set model.shard to false",
        )
    for parameter in policy.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
    device = next(policy.parameters()).device
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    precision = MixedPrecisionPolicy()
    if compute.itemsize < 4:
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    modules: list[tuple[torch.nn.Module, MixedPrecisionPolicy]] = [
        *((layer, precision) for layer in layers),
        (policy, precision),
    ]
    if policy.critic is not None:
        modules.insert(0, (policy.critic, MixedPrecisionPolicy()))  # values in full precision
    for module, how in modules:
        divided: Any = fully_shard(module, mesh=mesh, mp_policy=how)
        # The loss is divided by what all processes have: their gradients are added up.
        divided.set_gradient_divide_factor(1.0)
        # Not every backend can scale while it sums.
        divided.set_force_sum_reduction_for_comms(True)


def whole_weights(
    policy: LanguagePolicy, publish: Callable[[Any], Weights] = published_weights
) -> dict[str, Tensor]:
    """What engines need, on the host: gathered one after the other, so that no device ever holds
    the whole model. All processes call it; each gets all.
    """
    weights = publish(policy.model)
    compute = policy.compute_dtype
    return {name: full_tensor(value.to(compute)).cpu() for name, value in weights.items()}


def empty_pack(device: torch.device) -> Pack:
    """A pack of one token and nothing to predict. A process that has fewer packs than others takes
    part in the rest of their passes with it: layers are gathered by all or not at all.
    """
    layout, _ = lay_out([Row(1)])
    nothing, one = torch.empty(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    return Pack(one, one, layout, *[nothing] * 7).to(device)

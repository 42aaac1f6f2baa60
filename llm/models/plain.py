"""A model of transformers without weights of its own: it computes with those it is given, as the
learner does, without a copy of them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unirl.errors import UniRLError
from unirl.llm.models.model import TINY, ModelConfig, check_folder, drop_dropout, source_of
from unirl.llm.models.tiny import tiny_model
from unirl.llm.models.transformers import brief, import_transformers


class PlainModel:
    """module: a model on the meta device. buffers: what it computes with besides parameters."""

    def __init__(self, module: Any, buffers: Mapping[str, Tensor]) -> None:
        self._module, self._buffers = module.eval(), dict(buffers)

    @classmethod
    def of(cls, model: Any) -> PlainModel:
        """The same model, by transformers' own attention, with the buffers of this one."""
        settings = copy.deepcopy(model.config)
        settings._attn_implementation = "sdpa"
        with _explained(type(model).__name__):
            module = _on_meta(type(model)._from_config, settings)
        return cls(module, dict(model.named_buffers()))

    @classmethod
    def named(cls, config: ModelConfig) -> PlainModel:
        """From a model's settings alone. Raises UniRLError where they do not suffice."""
        if config.path == TINY:
            return cls.of(tiny_model(config.seed))
        check_folder(config.path)
        transformers = import_transformers()
        with _explained(config.path):
            settings = transformers.AutoConfig.from_pretrained(config.path, **source_of(config))
            drop_dropout(settings)
            make = partial(
                transformers.AutoModelForCausalLM.from_config,
                trust_remote_code=config.trust_remote_code,
            )
            module = _on_meta(make, settings)
        return cls(module, _made_buffers(module))

    @property
    def vocabulary(self) -> int:
        return int(self._module.get_input_embeddings().weight.shape[0])

    @torch.no_grad()
    def logp(self, weights: Mapping[str, Tensor], tokens: tuple[int, ...]) -> Tensor:
        """Log-probabilities of all tokens but the first, each given those before it: [n - 1], on
        the host. Raises UniRLError for weights that do not fit.
        """
        own = dict(self._module.named_parameters())
        wrong = [n for n, p in own.items() if n not in weights or weights[n].shape != p.shape]
        if wrong:
            raise UniRLError(
                f"weights do not fit {type(self._module).__name__}",
                f"{len(wrong)} of {len(own)} parameters are missing or of another shape, such as "
                f"{wrong[0]}",
                "learner and engine must load the same model.path",
            )
        first = next(iter(weights.values()))
        state = {name: value.to(first.device) for name, value in self._buffers.items()}
        state |= {name: weights[name] for name in own}
        ids = torch.tensor([tokens], device=first.device)
        call: Any = torch.func.functional_call
        with _explained(type(self._module).__name__):
            logits = call(self._module, state, (), {"input_ids": ids, "use_cache": False}).logits[0]
        logp = logits[:-1].float().log_softmax(-1)
        found: Tensor = logp.gather(1, ids[0, 1:, None])[:, 0].cpu()
        return found


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Not all code of models works without their weights: that is no reason to end a run."""
    try:
        yield
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, TypeError) as error:
        raise UniRLError(
            f"{name} cannot be computed from its settings alone", brief(error), "see the log"
        ) from error


def _on_meta(make: Callable[[Any], Any], settings: Any) -> Any:
    # What is drawn for weights that are not there must not shift what others draw.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return make(settings)


def _made_buffers(module: Any) -> dict[str, Tensor]:
    """What the model makes of its settings, such as the frequencies of its positions. Raises
    UniRLError for what only its checkpoint has.
    """
    saved = module.state_dict().keys()
    for path, part in module.named_modules():
        own = dict(part.named_buffers(recurse=False))
        for name, value in own.items():
            if f"{path}.{name}".lstrip(".") in saved or not value.is_floating_point():
                raise UniRLError(
                    f"buffer {path}.{name} of {type(module).__name__} is not known",
                    "only its checkpoint has it",
                    "engine.kind hf has one",
                )
            nothing = torch.full_like(value, float("nan"), device="cpu")
            part.register_buffer(name, nothing, persistent=False)
        if own:
            with _explained(type(module).__name__):
                module._init_weights(part)
    return dict(module.named_buffers())

"""Adapters learn and their base stays; engines get both in one; recomputing layers changes nothing
but memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("peft", reason="adapters need peft, of the extra llm")

from tests.llm.packed_groups import make_groups, make_model
from tests.llm.test_learner import PLAIN, batch_of, close, groups_with_rewards, make_learner, moved
from tests.llm.test_ranks import copied
from unirl.core.training_budget import TrainingBudget
from unirl.errors import UniRLError
from unirl.learners.optimizer import OptimizerConfig
from unirl.llm import assembly
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.resolve import resolve
from unirl.llm.engine import Request, SamplingConfig
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.learner_config import LlmLearnerConfig
from unirl.llm.models.lora import add_adapters, published_weights
from unirl.llm.models.model import ModelConfig, load_flat_weights
from unirl.llm.models.tiny import tiny_model, tiny_tokenizer
from unirl.llm.training.language_policy import LanguagePolicy
from unirl.llm.training.learner import LlmLearner
from unirl.llm.training.packing import pack_groups
from unirl.recipes.grpo import Config

LORA = ModelConfig(lora_rank=4, lora_alpha=16.0)
FAST: dict[str, Any] = {"optimizer": OptimizerConfig(lr=0.03, max_grad_norm=1e9)}


def adapted(dtype: torch.dtype = torch.float32, *, began: bool = True) -> Any:
    """A model with adapters. began: they are no longer zero, as after some updates."""
    torch.manual_seed(2)
    model = add_adapters(make_model(dtype=dtype), LORA)
    if began:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.1)
    return model


def learner_of(model: Any, **settings: Any) -> LlmLearner:
    dtype = settings.pop("dtype", torch.float32)
    return make_learner(settings.pop("algorithm", None), dtype=dtype, model=model, **settings)


def frozen(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def test_adapters_learn_and_their_base_stays() -> None:
    model = adapted(began=False)
    before = frozen(model)
    learner = learner_of(model, **FAST)
    found = moved(learner, groups_with_rewards(), groups_with_rewards(1))
    assert len(found) == 2 * 7 * 2  # layers, linear layers of each, A and B
    assert all("lora_" in name for name in found)
    assert all(float(value.abs().max()) > 0 for value in found.values())
    assert before.keys() == frozen(model).keys()
    assert all(torch.equal(value, before[name]) for name, value in frozen(model).items())


def test_engines_get_base_and_adapters_in_one() -> None:
    model, plain = adapted(), make_model(dtype=torch.float32)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    before = plain(input_ids=tokens).logits.detach()
    load_flat_weights(plain, published_weights(model))
    with torch.no_grad():
        wanted, found = model(input_ids=tokens).logits, plain(input_ids=tokens).logits
    assert float((before - wanted).abs().max()) > 0.1
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_the_engine_draws_with_the_learners_probabilities() -> None:
    torch.manual_seed(2)
    model = add_adapters(tiny_model(), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)
    policy = LanguagePolicy(model, temperature=0.7)
    prompt = tuple(tiny_tokenizer()("12>")["input_ids"])

    async def generate() -> Any:
        engine = HfEngine(ModelConfig())
        await engine.start()
        await engine.load_weights(published_weights(model), 3)
        sampling = SamplingConfig(max_tokens=12, temperature=0.7)
        done = [engine.generate(Request(f"{i}", prompt, sampling, i)) for i in range(4)]
        found = await asyncio.gather(*done)
        await engine.close()
        return found

    completions = asyncio.run(generate())
    (group,) = make_groups((len(prompt), [len(one.tokens) for one in completions]))
    flat = [token for one in completions for token in one.tokens]
    group.prompt.copy_(torch.tensor(prompt))
    group.token.copy_(torch.tensor(flat))
    logp, _ = policy.look(pack_groups([group], 1000), len(flat))
    drawn = torch.tensor([value for one in completions for value in one.logp])
    torch.testing.assert_close(logp, drawn, rtol=0, atol=2e-5)
    base = LanguagePolicy(tiny_model(), temperature=0.7)
    assert float((base.look(pack_groups([group], 1000), len(flat))[0] - drawn).abs().max()) > 0.01


def test_the_base_serves_as_the_reference() -> None:
    def found(reference: LanguagePolicy | None, kl_coef: float = 0.5) -> dict[str, Tensor]:
        learner = LlmLearner(
            LanguagePolicy(adapted(), temperature=0.7),
            resolve(AlgorithmConfig(kl_coef=kl_coef, kl="k3"), max_tokens=16),
            LlmLearnerConfig(optimizer=PLAIN),
            reward_weights={"test": 1.0},
            max_tokens=16,
            skip_zero=True,
            budget=TrainingBudget(1000),
            seed=3,
            reference=reference,
        )
        return moved(learner, groups_with_rewards())

    base = LanguagePolicy(make_model(dtype=torch.float32), temperature=0.7)
    close(found(None), found(base), 1e-5)
    free = found(None, kl_coef=0.0)
    assert any(
        float((value - free[name]).abs().max()) > 1e-3 for name, value in found(None).items()
    )


def test_a_checkpoint_holds_adapters_only_and_continues_bit_for_bit() -> None:
    learner = learner_of(adapted(), minibatches=2, **FAST)
    for update in range(2):
        learner.step(batch_of(groups_with_rewards(update), update))
    state = copied(learner.state_dict())
    assert all("lora_" in name for name in state.model)
    assert all("lora_" in name for name in state.optimizer["update"])
    again = learner_of(adapted(), minibatches=2, **FAST)
    again.load_state_dict(state)
    again.version, again.num_steps = learner.version, learner.num_steps
    for update in range(2, 4):
        for each in (learner, again):
            each.step(batch_of(groups_with_rewards(update), update))
    mine, theirs = learner.weights(), again.weights()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_evaluation_gets_the_same_weights_from_a_checkpoint() -> None:
    config = Config(model=ModelConfig(lora_rank=4))
    algorithm = assembly.algorithm_of(config)
    policy = assembly.make_policy(config, algorithm, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    saved = {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}
    assert saved and all("lora_" in name for name in saved)
    found, wanted = assembly.weights_of(saved, config=config), published_weights(policy.model)
    assert found.keys() == wanted.keys() == dict(tiny_model().named_parameters()).keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def test_the_base_in_bfloat16_is_merged_once_in_full_precision() -> None:
    model = adapted(torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    weights = published_weights(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    wanted = (layer.base_layer.weight.float() + 4.0 * (b @ a)).bfloat16()
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], wanted)


def test_layers_without_adapters_are_named() -> None:
    wrong = ModelConfig(lora_rank=4, lora_targets=("query",))
    with pytest.raises(UniRLError, match=r"model.lora_targets \['query'\] do not fit"):
        add_adapters(make_model(), wrong)


# -- gradient checkpointing ------------------------------------------------------------------------


def recomputing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def kept_bytes(model: Any) -> int:
    """What a forward pass keeps for its gradient, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    policy = LanguagePolicy(model, temperature=1.0)
    groups = make_groups((20, [60] * 6))
    (pack,) = pack_groups(groups, 10_000)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        terms = policy(pack)
    del terms
    return sum(kept.values())


@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_layers_give_the_same_gradient(lora: bool) -> None:
    def model() -> Any:
        return adapted(torch.float64) if lora else make_model().requires_grad_(True)

    groups = groups_with_rewards()
    settings: dict[str, Any] = {"dtype": torch.float64}
    plain = moved(learner_of(model(), **settings), groups)
    recomputed = moved(learner_of(recomputing(model()), **settings), groups)
    close(plain, recomputed, 1e-9)


def test_recomputed_layers_keep_less() -> None:
    sizes = {"num_hidden_layers": 6, "dtype": torch.float32}
    plain = make_model(**sizes).requires_grad_(True)
    recomputed = recomputing(make_model(**sizes).requires_grad_(True))
    assert kept_bytes(recomputed) < 0.35 * kept_bytes(plain)


def test_nothing_is_kept_of_a_look() -> None:
    policy = LanguagePolicy(recomputing(adapted()), temperature=1.0)
    packs = pack_groups(make_groups((5, [4, 4])), 1000)
    logp, _ = policy.look(packs, 8)
    assert logp.grad_fn is None and not logp.requires_grad

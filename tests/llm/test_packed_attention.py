"""Packed forward and backward against the plain model, which reads one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.llm.packed_groups import VOCAB, gradients, make_groups, make_model, plain_logp
from unirl.errors import UniRLError
from unirl.llm.group import Group
from unirl.llm.training.language_policy import LanguagePolicy, TokenTerms
from unirl.llm.training.packed_attention import hidden_states
from unirl.llm.training.packed_check import check_packing
from unirl.llm.training.packing import Pack, pack_groups

pytest.importorskip("transformers", reason="needs transformers models")

BATCH: list[tuple[int, list[int]]] = [
    (5, [7, 2, 1, 12]),
    (9, [3, 3, 3]),
    (1, [4, 6]),
    (5, [0, 9]),
]
TEMPERATURE = 0.7


def token_logp_of(
    model: Any, pack: Pack, *, temperature: float = 1.0, want_entropy: bool = False
) -> TokenTerms:
    policy = LanguagePolicy(model, temperature=temperature)
    terms: TokenTerms = policy(pack, want_entropy=want_entropy)
    return terms


def weights(groups: list[Group]) -> Tensor:
    """Something to multiply each token's log-probability with: [tokens of the batch, 2]"""
    num = sum(group.token.numel() for group in groups)
    return torch.randn(num, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def plain(model: Any, groups: list[Group]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logp, entropy = plain_logp(model, groups, TEMPERATURE)
    a, b = (weights(groups) * torch.cat([group.mask for group in groups])[:, None]).unbind(1)
    (a * logp + b * entropy).sum().backward()
    return logp.detach(), entropy.detach(), gradients(model)


def packed(
    model: Any, groups: list[Group], budget: int = 10**6, share: bool = True, flip: bool = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same through packs, micro-batch by micro-batch; what is not trained is NaN."""
    logp = torch.full((sum(group.token.numel() for group in groups),), torch.nan).double()
    entropy = logp.clone()
    packs = pack_groups(groups, budget, share_prompt=share)
    for pack in reversed(packs) if flip else packs:
        found = token_logp_of(model, pack, temperature=TEMPERATURE, want_entropy=True)
        assert found.entropy is not None
        a, b = weights(groups)[pack.flat].unbind(1)
        (a * found.logp + b * found.entropy).sum().backward()
        logp[pack.flat], entropy[pack.flat] = (
            found.logp.detach().double(),
            found.entropy.detach().double(),
        )
    return logp, entropy, gradients(model)


def assert_same(
    one: tuple[Tensor, Tensor, dict[str, Tensor]],
    other: tuple[Tensor, Tensor, dict[str, Tensor]],
    mask: Tensor,
    tolerance: float,
) -> None:
    for left, right in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(left[mask], right[mask], rtol=0, atol=tolerance)
    assert one[2].keys() == other[2].keys()
    for name, gradient in one[2].items():
        scale = float(other[2][name].abs().max())
        assert scale > 0, name
        torch.testing.assert_close(
            gradient, other[2][name], rtol=0, atol=tolerance * max(scale, 1), msg=name
        )


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama untied, a key head per query head": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
    },
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mistral": {},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
def test_packed_equals_one_sequence_at_a_time(kind: str, tools: bool) -> None:
    model = make_model(kind.split()[0], **KINDS[kind])
    groups = make_groups(*BATCH, tools=tools)
    mask = torch.cat([group.mask for group in groups])
    expected = plain(model, groups)
    for share in (True, False):
        assert_same(packed(model, groups, share=share), expected, mask, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_results_depend_neither_on_split_nor_on_order_nor_on_sharing(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    groups = make_groups(*BATCH)
    mask = torch.cat([group.mask for group in groups])
    expected = packed(model, groups)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for budget in (1, 17, 40):
        for share in (True, False):
            for flip in (True, False):
                assert_same(packed(model, groups, budget, share, flip), expected, mask, tolerance)


@pytest.mark.parametrize("cost", [0, 10**9], ids=["many blocks", "one block"])
def test_blocks_change_nothing(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    groups = make_groups(*BATCH)
    mask = torch.cat([group.mask for group in groups])
    expected = packed(model, groups)
    monkeypatch.setattr("unirl.llm.training.packed_layout.CALL_COST", cost)
    # As if completions were thousands of tokens long: several calls per block.
    monkeypatch.setattr("unirl.llm.training.packed_attention.QUERIES", 3)
    assert_same(packed(model, groups), expected, mask, 1e-12)


def test_a_changed_document_changes_no_other() -> None:
    model = make_model()
    groups = make_groups(*BATCH)
    changed = make_groups(*BATCH)
    begin, end = changed[0].starts[3:5].tolist()
    changed[0].token[begin:end] = (changed[0].token[begin:end] + 1) % VOCAB
    changed[2].prompt[0] = (changed[2].prompt[0] + 1) % VOCAB
    (pack,), (other,) = pack_groups(groups, 10**6), pack_groups(changed, 10**6)
    one, two = (token_logp_of(model, p).logp.detach() for p in (pack, other))
    first = sum(len(lengths) for _, lengths in BATCH[:2])
    touched = (pack.sequence == 3) | ((pack.sequence >= first) & (pack.sequence < first + 2))
    assert torch.equal(one[~touched], two[~touched])
    assert (one[touched] != two[touched]).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    model = make_model()
    groups = make_groups(*BATCH)
    mask = torch.cat([group.mask for group in groups])
    expected = packed(model, groups)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[0].self_attn.register_forward_hook(count)
    assert_same(packed(model, groups), expected, mask, 1e-12)
    assert calls == 2


def test_a_low_rank_adapter_learns_as_it_does_without_packs() -> None:
    peft = pytest.importorskip("peft", reason="needs LoRA")
    config = peft.LoraConfig(
        r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(make_model(), config)
    groups = make_groups(*BATCH)
    mask = torch.cat([group.mask for group in groups])
    expected = plain(model, groups)
    assert all("lora" in name for name in expected[2])
    assert_same(packed(model, groups), expected, mask, 1e-11)


def test_bfloat16_is_near_float32() -> None:
    groups = make_groups(*BATCH)
    (pack,) = pack_groups(groups, 10**6)
    exact = make_model(dtype=torch.float32, initializer_range=0.05)
    model = make_model(dtype=torch.float32, initializer_range=0.05).bfloat16()
    right, found = (token_logp_of(one, pack).logp for one in (exact, model))
    assert found.dtype == torch.float32
    assert (found - right).abs().max() < 0.05
    found.sum().backward()
    right.sum().backward()
    expected = gradients(exact)
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_matrix_products_attend_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(dtype=torch.float32)
    groups = make_groups(*BATCH)
    mask = torch.cat([group.mask for group in groups])
    expected = packed(model, groups)
    calls: list[int] = []

    def always(query: Tensor, num_keys: int, dropout: float) -> bool:
        calls.append(num_keys)
        return True

    monkeypatch.setattr("unirl.llm.training.packed_attention.is_short", always)
    assert_same(packed(model, groups), expected, mask, 1e-5)
    assert max(calls) > 9


def test_other_calls_of_a_prepared_model_work_as_before() -> None:
    model = make_model()
    ids = torch.randint(VOCAB, (2, 6))
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=padding).logits
    one = model(input_ids=ids[:1, :1]).logits
    hidden_states(model, pack_groups(make_groups((2, [3])), 10)[0])
    assert torch.equal(model(input_ids=ids, attention_mask=padding).logits, before)
    assert torch.equal(model(input_ids=ids[:1, :1]).logits, one)


def test_hidden_states_are_those_of_the_tokens() -> None:
    model = make_model()
    (group,) = make_groups((4, [6]))
    (pack,) = pack_groups([group], 100)
    found = hidden_states(model, pack)
    assert found.shape == (9, 32)
    expected = model.model(input_ids=pack.input_ids).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_models_that_are_not_known_are_refused() -> None:
    (pack,) = pack_groups(make_groups((2, [3])), 10)
    with pytest.raises(UniRLError, match="sliding window of 4"):
        hidden_states(make_model("mistral", sliding_window=4), pack)
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    with pytest.raises(UniRLError, match="sliding_attention"):
        hidden_states(make_model("qwen2", **window), pack)
    with pytest.raises(UniRLError, match="sliding_attention"):
        hidden_states(make_model("gemma2"), pack)
    with pytest.raises(UniRLError, match="final_logit_softcapping = 30"):
        token_logp_of(make_model("gemma2"), pack)
    with pytest.raises(UniRLError, match="logit_scale"):
        token_logp_of(make_model("cohere"), pack)
    with pytest.raises(UniRLError, match="softcap=50"):
        hidden_states(make_model("gemma2", layer_types=["full_attention"] * 2), pack)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UniRLError, match="rope_type dynamic they may be 3"):
        hidden_states(make_model(rope_parameters=dynamic, max_position_embeddings=3), pack)
    with pytest.raises(UniRLError, match="get_decoder"):
        hidden_states(torch.nn.Linear(2, 2), pack)


def test_attention_that_does_not_hear_of_the_pack_is_refused() -> None:
    (pack,) = pack_groups(make_groups((2, [3])), 10)
    model = make_model()

    def forget(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: value for name, value in kwargs.items() if name != "unirl_packing"}

    model.model.layers[1].self_attn.register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(UniRLError, match="does not hand keyword arguments on"):
        hidden_states(model, pack)


def test_an_adapter_on_the_output_layer_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="needs LoRA")
    (pack,) = pack_groups(make_groups((2, [3])), 10)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "lm_head"])
    model = peft.get_peft_model(make_model(tie_word_embeddings=False), config)
    with pytest.raises(UniRLError, match="output layer"):
        token_logp_of(model, pack)
    config = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(), config)
    with pytest.raises(UniRLError, match="learns a prompt"):
        token_logp_of(model, pack)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_check_before_training_lets_known_models_pass(dtype: torch.dtype) -> None:
    model = make_model("qwen3", dtype=dtype).train()
    assert check_packing(model, TEMPERATURE) < (0.3 if dtype == torch.bfloat16 else 1e-4)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_check_before_training_finds_what_no_setting_tells(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    # A layer that mixes neighbours, as convolutions and recurrent layers do.
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.roll(1, 1))
    with pytest.raises(UniRLError, match="other log-probabilities on packs"):
        check_packing(model)
    model = make_model(dtype=dtype)
    model.lm_head.register_forward_hook(lambda _, __, out: 3 * torch.tanh(out / 3))
    with pytest.raises(UniRLError, match="other log-probabilities on packs"):
        check_packing(model)

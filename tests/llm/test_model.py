"""Models are found, loaded and written; a checksum tells their weights apart."""

import json
from pathlib import Path

import pytest
import torch

from unirl.errors import UniRLError
from unirl.llm.models.checksum import checksum
from unirl.llm.models.model import (
    ModelConfig,
    check_effect,
    context_length,
    end_token_ids,
    flat_weights,
    load_flat_weights,
    load_model,
    load_tokenizer,
)

transformers = pytest.importorskip("transformers", reason="models are transformers'")

from unirl.commands.model import model as model_command  # noqa: E402
from unirl.llm.models.tiny import make_tiny, tiny_model, tiny_tokenizer  # noqa: E402


def test_the_tiny_model_is_the_same_for_the_same_seed_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = tiny_model(seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert checksum(tiny_model(seed=5)) == checksum(first)
    assert checksum(tiny_model(seed=6)) != checksum(first)
    assert 0.5e6 < sum(weight.numel() for weight in first.parameters()) < 1.5e6


def test_a_written_tiny_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    config = ModelConfig(path=str(make_tiny(tmp_path / "tiny", seed=3)))
    model, tokenizer = load_model(config), load_tokenizer(config)
    assert checksum(model) == checksum(load_model(ModelConfig(seed=3)))
    assert not model.training
    assert tokenizer.encode("12+3=") == tiny_tokenizer().encode("12+3=")
    assert end_token_ids(tokenizer, model) == (tokenizer.eos_token_id,)
    assert context_length(model) == 512


def test_the_tiny_tokenizer_gives_back_every_text_it_knows() -> None:
    tokenizer = tiny_tokenizer()
    text = 'what is 3 + 4?\n"7", i\'d say: {[(<|>)]} #%&*,-./;=@\\^_`~!$'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.encode("A") == tokenizer.encode("a")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<bos>12>"


def test_the_model_computes_in_the_dtype_asked_for() -> None:
    assert load_model(ModelConfig(dtype="bfloat16")).dtype == torch.bfloat16
    assert load_model(ModelConfig()).dtype == torch.float32


def test_dropout_is_off_even_in_training(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    settings = json.loads((folder / "config.json").read_text())
    settings["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(settings))
    model = load_model(ModelConfig(path=str(folder))).train()
    ids = torch.tensor([[1, 5, 6, 7]])
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_end_tokens_of_generation_settings_count_too() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    assert end_token_ids(tokenizer, model) == (2, 7, 9)


def test_tied_weights_are_there_once_and_loading_changes_both() -> None:
    model, other = tiny_model(seed=0), tiny_model(seed=1)
    weights = flat_weights(other)
    assert "lm_head.weight" not in weights
    assert "model.embed_tokens.weight" in weights
    load_flat_weights(model, weights)
    assert checksum(model) == checksum(weights)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    ids = torch.tensor([[1, 5, 6]])
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_weights_that_do_not_fit_are_named_and_nothing_is_copied() -> None:
    model = tiny_model(seed=0)
    before = checksum(model)
    good = flat_weights(tiny_model(seed=1))
    name = "model.norm.weight"
    missing = {key: value for key, value in good.items() if key != name}
    with pytest.raises(UniRLError, match=rf"1 missing \({name}\)"):
        load_flat_weights(model, missing)
    with pytest.raises(UniRLError, match=r"1 unknown \(lm_head.weight\)"):
        load_flat_weights(model, {**good, "lm_head.weight": torch.zeros(1)})
    with pytest.raises(UniRLError, match=r"must be \[128\], it is \[3\]"):
        load_flat_weights(model, {**good, name: torch.zeros(3)})
    assert checksum(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_the_checksum_sees_one_changed_bit_anywhere(dtype: torch.dtype) -> None:
    weights = {"a": torch.arange(3001).to(dtype), "b": torch.ones(5, 7).to(dtype)}
    expected = checksum(weights)
    for place in (0, 1, 1500, 2999, 3000):
        changed = {**weights, "a": weights["a"].clone()}
        changed["a"].view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert checksum(changed) != expected


def test_the_checksum_sees_where_weights_are_but_not_their_order() -> None:
    a, b = torch.randn(4096, generator=torch.Generator().manual_seed(0)).chunk(2)
    assert checksum({"a": a, "b": b}) == checksum({"b": b, "a": a})
    assert checksum({"a": a, "b": b}) != checksum({"a": b, "b": a})
    assert checksum({"a": torch.cat([a, b])}) != checksum({"a": torch.cat([b, a])})


def test_the_checksum_reads_tensors_that_begin_within_eight_bytes() -> None:
    memory = torch.arange(64, dtype=torch.bfloat16)
    assert checksum({"a": memory[1:40]}) == checksum({"a": memory[1:40].clone()})


def test_missing_models_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match=r"does not exist.*unirl model smollm2"):
        load_model(ModelConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(UniRLError, match=r"holds no model.*config\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_folder_without_tokenizer_or_weights_is_explained(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (folder / "model.safetensors").unlink()
    config = ModelConfig(path=str(folder))
    with pytest.raises(UniRLError, match=r"tokenizer of .* cannot be loaded.*copy"):
        load_tokenizer(config)
    with pytest.raises(UniRLError, match=r"model .* cannot be loaded"):
        load_model(config)


@pytest.mark.parametrize(
    "wrong", [{"path": ""}, {"lora_rank": -1}, {"lora_alpha": 0.0}, {"lora_dropout": 1.0}]
)
def test_settings_without_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UniRLError, match=r"model\.") as caught:
        ModelConfig(**wrong)  # type: ignore[arg-type]
    assert len(caught.value.parts) == 3


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"lora_alpha": 64.0}, "set model.lora_rank"),
        ({"lora_targets": ("q_proj",)}, "set model.lora_rank"),
        ({"lora_dropout": 0.1}, "set model.lora_rank"),
        ({"revision": "main"}, "leave it out"),
        ({"path": "somewhere", "seed": 3}, "run.seed"),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, object], remedy: str) -> None:
    name = list(given)[-1]
    with pytest.raises(UniRLError, match=rf"model\.{name} is .* has no effect") as caught:
        check_effect(ModelConfig(**given))  # type: ignore[arg-type]
    assert remedy in caught.value.parts[2]


def test_settings_that_go_together_are_taken() -> None:
    check_effect(ModelConfig(lora_rank=2, lora_alpha=64.0, lora_targets=("q_proj",), seed=3))
    check_effect(ModelConfig(path="somewhere", revision="main"))


def test_the_command_writes_a_model_and_never_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    assert model_command(["tiny", str(folder)]) == 0
    assert f"--model.path {folder}" in capsys.readouterr().out
    assert load_model(ModelConfig(path=str(folder))).config.model_type == "llama"
    with pytest.raises(UniRLError, match="is there already"):
        model_command(["tiny", str(folder)])
    with pytest.raises(UniRLError, match=r'did you mean "tiny"\?'):
        model_command(["tinny", str(folder)])
    with pytest.raises(UniRLError, match="nothing cannot be written"):
        model_command([])


@pytest.mark.slow
def test_smollm2_answers_a_question(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="reads the quantised file")
    from unirl.llm.models.smollm2 import answer, make_smollm2

    try:
        folder = make_smollm2(tmp_path / "smollm2")
    except UniRLError as error:
        pytest.skip(str(error))
    config = ModelConfig(path=str(folder))
    model, tokenizer = load_model(config), load_tokenizer(config)
    assert model.dtype == torch.bfloat16
    assert "Paris" in answer(model, tokenizer)

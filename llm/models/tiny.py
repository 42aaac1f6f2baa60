"""A Llama of about a million weights with a tokenizer of single characters, made on the spot: what
tests and first runs train where no pretrained model is at hand.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unirl.errors import UniRLError
from unirl.imports import large_imports
from unirl.llm.models.transformers import import_transformers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
"""Most tokens of prompt and completion together."""
PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_lowercase + " \n" + string.punctuation
"""What the tokenizer knows, one token each, besides the four special ones."""
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, in lower case; what it does not know becomes <unk>. It adds no
    special tokens by itself; its chat template begins with <bos> and ends the question with ">".
    """
    transformers = import_transformers()
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    names = [PAD, BOS, EOS, UNKNOWN, *CHARACTERS]
    inner = tokenizers.Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=UNKNOWN)
    )
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


@large_imports()
def tiny_model(
    seed: int = 0,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    attention: str = "sdpa",
) -> LlamaForCausalLM:
    """A Llama with random weights in float32: the same for the same seed, whatever was drawn
    before, and the random state outside is left alone. Embeddings are tied.
    """
    transformers = import_transformers()
    settings = transformers.LlamaConfig(
        vocab_size=4 + len(CHARACTERS),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=width**-0.5,
        attn_implementation=attention,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.LlamaForCausalLM(settings)
    return model.eval()  # type: ignore[no-any-return]


def make_tiny(folder: str | Path, seed: int = 0, **sizes: Any) -> Path:
    """Write model and tokenizer as a folder that AutoModelForCausalLM and AutoTokenizer read.

    Raises UniRLError when the folder holds a model already.
    """
    folder = Path(folder).expanduser()
    check_new_folder(folder)
    tiny_model(seed, **sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def check_new_folder(folder: Path) -> None:
    """Raises UniRLError when it holds a model, which would be overwritten, or is a file."""
    if folder.is_file() or (folder / "config.json").exists():
        raise UniRLError(
            f"{folder} is there already",
            "a model is written to a new or an empty folder, never over another one",
            "name another folder, or remove this one",
        )

"""A small BPE with a ChatML template that knows tools and leaves out earlier thoughts, and a Llama
of its vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

TEMPLATE = (
    (
        "{%- if tools %}<|im_start|>system\n{%- if messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n{%- endif %}Tools:{% for tool in tools %}\n{{ tool | tojson }}"
        "{% endfor %}<|im_end|>\n{%- elif messages[0].role == 'system' %}<|im_start|>system\n"
        "{{ messages[0].content }}<|im_end|>\n{% endif %}"
        "{%- for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n"
        "<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
        "{%- elif message.role != 'system' %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{%- endif %}{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    .replace("-%}", "%}")
    .replace("{%-", "{%")
)
CORPUS = [
    "you are an agent that answers questions and calls tools",
    "what is the sum of 12 and 30? the answer is 42.",
    '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>',
    "the weather in paris is sunny; a thought, and another thought\n\nand then a line",
] * 4


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_model(tokenizer: Any, seed: int = 0, context: int = 4096) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(settings).eval()

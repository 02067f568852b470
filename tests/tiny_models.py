"""Tiny random targets on disk: real transformers classes, real tokenizer files, a chat template with a mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from nemo_eagle3_sglang.contracts import BackendRequest

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + ' <|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <|im_end|>' }}{% endif %}{{ ' ' }}{% endfor %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>user", "<|im_start|>assistant", "<|im_start|>system", "<|im_end|>"]

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Wide weights and norms away from one, so that a mistake in a norm or a residual is no rounding error.
    "initializer_range": 0.2,
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_model(kind: str, **overrides: Any) -> transformers.PreTrainedModel:
    """Return a random float32 causal LM of ``kind``, the same one at every call with the same arguments."""
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**DIMENSIONS, **overrides})).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


def save_tokenizer(folder: Path, vocab_size: int, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a word-level tokenizer of ``vocab_size`` words: the special ones, then ``w7``, ``w8``, …"""
    words = {**{w: i for i, w in enumerate(SPECIAL)}, **{f"w{i}": i for i in range(len(SPECIAL), vocab_size)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def save_target(folder: Path, kind: str = "llama", chat_template: str | None = CHAT_TEMPLATE, **overrides: Any) -> Path:
    """Write a tiny target with its tokenizer and return its folder."""
    model = make_model(kind, **overrides)
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size, chat_template)
    return folder


def make_request(target: Path, **overrides: Any) -> BackendRequest:
    """Return a request for ``target`` on the CPU in float32."""
    fields = {"device": torch.device("cpu"), "dtype": torch.float32, "seq_length": 64, "micro_batch_size": 4}
    return BackendRequest(target=str(target), **{**fields, **overrides})


def chat_rows(count: int, vocab_size: int = 500, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of one turn, of different lengths, whose answers repeat the question (so can be learnt)."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 20, (1,), generator=generator))
        words = torch.randint(len(SPECIAL), vocab_size, (length,), generator=generator).tolist()
        text = " ".join(f"w{w}" for w in words)
        rows.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]})
    return rows


def write_chat(path: Path, count: int, **kwargs: Any) -> Path:
    """Write :func:`chat_rows` as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(count, **kwargs)), encoding="utf-8")
    return path

"""Tiny random-weight students of both families, and what transformers says that they would answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shared.weights import TensorBytes, write_push
from tests.teacher.tiny_model import make_tokenizer

VOCAB = 320
EOS = 256


def make_model(family: str, *, tied: bool, seed: int) -> Any:
    """A float32 model whose logits spread over several nats, so that a wrong weight shows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "initializer_range": 0.2, "bos_token_id": EOS, "eos_token_id": EOS,
    }  # fmt: skip
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()


def save(model: Any, folder: Path) -> Path:
    """An ordinary model folder with a tokenizer."""
    model.save_pretrained(folder)
    make_tokenizer(folder, VOCAB)
    return folder


def push(model: Any, root: Path, version: int, *, dtype: str = "float32") -> Path:
    """What a trainer pushes: every tensor once, no lm_head where it is tied."""
    tensors = {name: value for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    import torch

    cast = {name: value.to(getattr(torch, dtype)).contiguous() for name, value in tensors.items()}
    records = [
        TensorBytes(name, dtype, tuple(value.shape), value.view(torch.uint8).numpy().tobytes())
        for name, value in cast.items()
    ]
    return write_push(root, version, records, keep=3)[0]


def logprobs(model: Any, token_ids: list[int]) -> np.ndarray:
    """[S-1] float32: log q of each token but the first, by a plain forward."""
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)[:-1]
    return rows.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()

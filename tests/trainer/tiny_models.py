"""Random-weight model folders, written by transformers, of the families that the trainer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 259
"""Odd, so that two ranks need padding."""

_MODELS: dict[str, tuple[type[transformers.PretrainedConfig], type[transformers.PreTrainedModel]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # so that tensor and context parallelism can both split them
    "head_dim": 16,
}


def save_tiny(folder: Path, family: str, *, tied: bool, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A four-layer model with grouped queries and weights large enough for logits that differ by several nats."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        **(_EXPERTS if family == "qwen3_moe" else {}),
        **changes,
    }
    torch.manual_seed(0)
    make_config, make_model = _MODELS[family]
    model = make_model(make_config(**shape))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def reference_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[S - 1] float32 by plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        log_q = model(ids).logits[0].log_softmax(-1)
    return log_q[:-1].gather(1, ids[0, 1:, None])[:, 0]

"""How a Megatron parameter is made of Hugging Face tensors, and how both are split over tensor-parallel ranks.

Both directions go through pieces: the part of every Hugging Face tensor that a rank has. `merge` makes a rank's
parameter of its pieces, `pieces` is the exact inverse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

from services.trainer.megatron_families import head_dim, num_experts

Kind = Literal["plain", "qkv"]

_OF_A_LAYER: dict[str, tuple[tuple[str, ...], int | None]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), None),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), None),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), 0),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), 0),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), 1),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), None),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), None),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), None),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), None),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), 1),
    "mlp.router.weight": (("mlp.gate.weight",), None),
}
"""Hugging Face names and the dimension that tensor parallelism splits, by Megatron's name within a layer.

A norm has two Megatron names: Transformer Engine fuses it with the layer behind it.
"""

_OF_AN_EXPERT = {"fc1": ("gate_proj", "up_proj"), "fc2": ("down_proj",)}
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.linear_(?P<a>fc[12])\.weight"  # one module per expert (CPU)
    r"|linear_(?P<b>fc[12])\.weight(?P<grouped>\d+))"  # all in one module (Transformer Engine)
)


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from.

    Attributes:
        hf_names: tensors that it is made of.
        dim: their dimension that is split over tensor-parallel ranks; None: every rank has all of it.
        kind: "qkv": interleaved by key-value head; "plain": one behind the other.
        vocabulary: rows beyond the vocabulary are zero and in no Hugging Face tensor.
        expert: it belongs to an expert, of which one expert-parallel rank has all.
        copy: a tied head, which the last pipeline stage has for itself; the embedding is exported.
    """

    hf_names: tuple[str, ...]
    dim: int | None = None
    kind: Kind = "plain"
    vocabulary: bool = False
    expert: bool = False
    copy: bool = False


def source_of(name: str, config: PretrainedConfig, *, first_layer: int, first_expert: int) -> Source:
    """The tensors of a parameter of this rank's GPT.

    Args:
        name: as `named_parameters` has it; layers and experts are counted from the rank's first.
        first_layer, first_expert: numbers of the rank's first layer and expert in the whole model.

    Raises:
        KeyError: a parameter that no family has.
    """
    if name == "embedding.word_embeddings.weight":
        return Source(("model.embed_tokens.weight",), 0, vocabulary=True)
    if name == "output_layer.weight" and config.tie_word_embeddings:
        return Source(("model.embed_tokens.weight",), 0, vocabulary=True, copy=True)
    if name == "output_layer.weight":
        return Source(("lm_head.weight",), 0, vocabulary=True)
    if name == "decoder.final_layernorm.weight":
        return Source(("model.norm.weight",))
    layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
    prefix = f"model.layers.{int(layer) + first_layer}."
    if match := _EXPERT.fullmatch(rest):
        expert = first_expert + int(match["local"] or match["grouped"])
        parts = _OF_AN_EXPERT[match["a"] or match["b"]]
        return Source(tuple(f"{prefix}mlp.experts.{expert}.{part}.weight" for part in parts), expert=True)
    names, dim = _OF_A_LAYER[rest]
    kind: Kind = "qkv" if rest.startswith("self_attention.linear_qkv.") and len(names) == 3 else "plain"
    return Source(tuple(prefix + part for part in names), dim, kind)


def merge(source: Source, parts: list[torch.Tensor], config: PretrainedConfig, num_rows: int) -> torch.Tensor:
    """A rank's parameter from its pieces of the Hugging Face tensors; `num_rows` is its first dimension."""
    if source.kind == "qkv":
        size = head_dim(config)
        groups = parts[1].shape[0] // size
        return torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], dim=1).flatten(0, 1)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if source.vocabulary and len(whole) < num_rows:
        whole = torch.cat([whole, whole.new_zeros(num_rows - len(whole), *whole.shape[1:])])
    return whole


def pieces(source: Source, parameter: torch.Tensor, config: PretrainedConfig, num_real: int) -> list[torch.Tensor]:
    """Inverse of `merge`: a rank's pieces; of a vocabulary only the first `num_real` rows are in one."""
    return [piece(source, parameter, config, num_real, index) for index in range(len(source.hf_names))]


def piece(source: Source, parameter: torch.Tensor, config: PretrainedConfig, num_real: int, index: int) -> torch.Tensor:
    """One of the `pieces`: a view of the parameter, but a copy where heads are interleaved."""
    if source.kind == "qkv":
        size = head_dim(config)
        share = config.num_attention_heads // config.num_key_value_heads
        grouped = parameter.reshape(-1, share + 2, size, *parameter.shape[1:])
        return grouped.split([share, 1, 1], dim=1)[index].flatten(0, 2)
    if source.vocabulary:
        return parameter[:num_real]
    return parameter.chunk(len(source.hf_names))[index]


def all_hf_names(config: PretrainedConfig) -> set[str]:
    """Every tensor that a folder of this model must have."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config.tie_word_embeddings:
        names.add("lm_head.weight")
    within = ["input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"]
    within.append("pre_mlp_layernorm.weight")
    if config.model_type == "qwen2":
        within.append("self_attention.linear_qkv.bias")
    if config.model_type.startswith("qwen3"):
        within += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    within += ["mlp.router.weight"] if num_experts(config) else ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    within += [f"mlp.experts.linear_{fc}.weight{e}" for e in range(num_experts(config)) for fc in _OF_AN_EXPERT]
    for layer in range(config.num_hidden_layers):
        for name in within:
            names.update(source_of(f"decoder.layers.{layer}.{name}", config, first_layer=0, first_expert=0).hf_names)
    return names

"""What Megatron has to know of a Hugging Face model: the families, their particulars, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F
from transformers import AutoConfig, PretrainedConfig

from services.trainer.split import Split
from shared.errors import ConfigError

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {"qk_layernorm": True},
}
"""`model_type` and what sets the family apart. SmolLM2 and others say that they are Llama, Qwen2.5 that it is Qwen2."""

_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's `rope_scaling` has built in."""


def read_hf_config(model_path: Path) -> PretrainedConfig:
    """The folder's config.json.

    Raises:
        ConfigError: no such folder, or a model that the trainer would get wrong.
    """
    if not (model_path / "config.json").is_file():
        raise ConfigError(f"student.model: {model_path} has no config.json; give a Hugging Face model folder")
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"student.model: {model_path} is a {config.model_type!r} model; the trainer knows {', '.join(FAMILIES)}"
        )
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    refused = {
        "has bias terms, which the trainer does not carry over": getattr(config, "mlp_bias", False)
        or getattr(config, "attention_bias", False),
        "uses sliding-window attention, which the trainer lacks": sliding
        or getattr(config, "use_sliding_window", False),
        f"has the activation {config.hidden_act!r}, the trainer silu": config.hidden_act != "silu",
        "mixes dense layers with layers of experts, which the trainer does not": getattr(
            config, "mlp_only_layers", None
        )
        or getattr(config, "decoder_sparse_step", 1) != 1,
    }
    for words, wrong in refused.items():
        if wrong:
            raise ConfigError(f"student.model: {model_path} {words}")
    return config


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer, 0 for a dense model."""
    return int(config.num_experts) if config.model_type == "qwen3_moe" else 0


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_split(config: PretrainedConfig, split: Split, *, cuda: bool) -> None:
    """Raises ConfigError, with the setting to change, when the model cannot be split like this."""
    experts = num_experts(config)
    parts = {
        "num_attention_heads": ("tensor_parallel", split.tp),
        "num_key_value_heads": ("tensor_parallel", split.tp),
        **({} if experts else {"intermediate_size": ("tensor_parallel", split.tp)}),
        "num_hidden_layers": ("pipeline_parallel", split.pp),
        **({"num_experts": ("expert_parallel", split.ep)} if experts else {}),
    }
    for name, (setting, size) in parts.items():
        if getattr(config, name) % size:
            raise ConfigError(
                f"trainer.{setting}: {size} does not divide the student's {name}, {getattr(config, name)}"
            )
    if split.ep > 1 and not experts:
        raise ConfigError(f"trainer.expert_parallel is {split.ep}, but the student has no experts; write 1")
    if experts and split.ep == 1 < split.tp:
        # Megatron would take whole experts for dense weights, and not add up what their tensor-parallel copies learn
        raise ConfigError(
            f"trainer.expert_parallel: with experts and trainer.tensor_parallel={split.tp} it must be at least 2"
        )
    if not cuda and (config.num_key_value_heads // split.tp) % split.cp:
        # Transformer Engine passes keys and values around instead and has no such limit
        raise ConfigError(
            f"trainer.context_parallel: {split.cp} does not divide the {config.num_key_value_heads // split.tp} "
            "key-value heads of a rank, as it has to on CPUs"
        )


def transformer_config(
    config: PretrainedConfig, split: Split, *, dtype: torch.dtype, cuda: bool, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of the model on this machine.

    Args:
        recompute: keep only the input of every layer for the backward pass and compute the rest again.

    Raises:
        ConfigError: the model cannot be split like this.
    """
    check_split(config, split, cuda=cuda)
    special: dict[str, Any] = dict(FAMILIES[config.model_type])
    if num_experts(config):
        special.update(
            num_moe_experts=config.num_experts,
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_router_topk=config.num_experts_per_tok,
            moe_router_pre_softmax=not config.norm_topk_prob,
            moe_router_load_balancing_type="none",  # the teacher's distribution is the only objective
            moe_grouped_gemm=cuda,
            expert_model_parallel_size=split.ep,
            expert_tensor_parallel_size=1,
        )
    if recompute:
        special.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=split.tp,
        pipeline_model_parallel_size=split.pp,
        context_parallel_size=split.cp,
        sequence_parallel=split.tp > 1,
        variable_seq_lengths=True,
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",  # the other kinds refuse variable lengths, with or without experts
        masked_softmax_fusion=cuda,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **special,
    )


def rope_args(config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of Megatron's GPT for the rotary embedding (transformers 5 keeps them in `rope_parameters`).

    Raises:
        ConfigError: a kind of scaling that Megatron lacks.
    """
    rope = dict(config.rope_parameters)
    args: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        args["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        for name, value in _LLAMA3_CONSTANTS.items():
            if rope[name] != value:
                raise ConfigError(f"student.model: rope {name} is {rope[name]}, Megatron's llama3 scaling has {value}")
        args.update(rope_scaling=True, rope_scaling_factor=rope["factor"])
    elif kind != "default":
        raise ConfigError(f"student.model: rope type {kind!r} is not supported; default, linear and llama3 are")
    return args

"""Hugging Face names and shapes for Megatron, through mbridge, with what its 0.15.1 lacks here.

Four things are mended: the layer spec without Transformer Engine, the names of that spec's layer norms, `rope_theta`
(transformers 5 keeps it in `rope_parameters`), and tied embeddings, which mbridge knows for Qwen alone. Its own
`get_model` insists on 16 bit, so the model is built by `megatron_gpt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import Bridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen3 import Qwen3Bridge
from transformers import AutoConfig, PretrainedConfig

from shared.errors import ConfigError

_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's `rope_scaling` has built in."""


class _HuggingFaceNames(Bridge):
    """Name maps of the instance, not of the class: one process may hold tied and untied models."""

    def _adjust_mapping_for_shared_weights(self) -> None:
        self._DIRECT_MAPPING = {**type(self)._DIRECT_MAPPING, "output_layer.weight": "lm_head.weight"}
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"
        prefix = "model.layers.{layer_number}."
        self._MLP_MAPPING = {
            **type(self)._MLP_MAPPING,
            "pre_mlp_layernorm.weight": [prefix + "post_attention_layernorm.weight"],
        }
        self._OTHER_MAPPING = {"input_layernorm.weight": [prefix + "input_layernorm.weight"]}

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **_rope_args(self.hf_config),
        }


class LlamaNames(_HuggingFaceNames, LLaMABridge):
    """Llama, and what says it is one (SmolLM2)."""


class Qwen3Names(_HuggingFaceNames, Qwen3Bridge):
    """Dense Qwen3."""


FAMILIES: dict[str, type[_HuggingFaceNames]] = {"llama": LlamaNames, "qwen3": Qwen3Names}


def read_hf_config(model_path: Path) -> PretrainedConfig:
    """The folder's config.json.

    Raises:
        ConfigError: no such folder, or an architecture that the trainer does not know.
    """
    if not (model_path / "config.json").is_file():
        raise ConfigError(f"student.model: {model_path} has no config.json; give a Hugging Face model folder")
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"student.model: {model_path} is a {config.model_type!r} model; the trainer knows {', '.join(FAMILIES)}"
        )
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        raise ConfigError(f"student.model: {model_path} has bias terms, which the trainer does not carry over")
    if getattr(config, "use_sliding_window", False):
        raise ConfigError(f"student.model: {model_path} uses sliding-window attention, which the trainer lacks")
    return config


def make_bridge(config: PretrainedConfig, *, dtype: torch.dtype, tp: int, cuda: bool) -> Bridge:
    """A bridge for the process's rank; parallel state must be initialised.

    Raises:
        ConfigError: the model cannot be split over `tp` ranks.
    """
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % tp:
            raise ConfigError(
                f"trainer.tensor_parallel: {tp} does not divide the student's {name}, {getattr(config, name)}"
            )
    bridge = FAMILIES[config.model_type](config, dtype=dtype, make_vocab_size_divisible_by=128 * tp if cuda else tp)
    bridge.set_extra_args(
        sequence_parallel=False,
        masked_softmax_fusion=cuda,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return bridge


def _rope_args(config: PretrainedConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    args: dict[str, Any] = {"rotary_base": rope["rope_theta"]}
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

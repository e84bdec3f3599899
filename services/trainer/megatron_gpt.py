"""Megatron's GPT for packed sequences: attention within each, logits only at the rows that carry loss.

A packed row of T tokens needs no T x T mask. On a CPU the sequences are grouped by length (within a factor of two),
each group is gathered into [B, S], and causal attention runs on it: what pads a sequence lies behind it, where causal
attention never looks, and is dropped again. On CUDA, Transformer Engine takes the borders of the sequences instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F
from transformers import PretrainedConfig

from services.trainer.megatron_families import num_experts, rope_args
from services.trainer.split import context_positions

LONGEST_WRITTEN_OUT = 1024
"""Sequences up to this length get their scores as one array; beyond it memory decides for the flash kernel."""


@dataclass
class PackedLayout(PackedSeqParams):
    """Where the sequences of a packed row lie, for `PackedAttention`.

    Attributes:
        groups: per group of sequences of similar length [B, S] int64 positions in the row; with context parallelism
            in the row that the ranks' tokens make one behind the other.
        restore: [T] int64 where each position's output lies in the groups' outputs one behind the other; None when
            one group in packed order is the whole row.
    """

    groups: list[torch.Tensor] = field(default_factory=list)
    restore: torch.Tensor | None = None


def packed_params(cu_seqlens: torch.Tensor, *, cp: int, cuda: bool) -> PackedSeqParams:
    """What the attention needs to know of borders `cu_seqlens` [B + 1] of the whole row, over `cp` ranks."""
    lengths = cu_seqlens.diff().long()
    longest = int(lengths.max())
    if cuda:
        borders = cu_seqlens.cuda()
        return PackedSeqParams("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest)
    starts = cu_seqlens[:-1].long()
    groups: list[torch.Tensor] = []
    restore = torch.empty(int(cu_seqlens[-1]), dtype=torch.int64)
    offset = 0
    for members in _groups_by_length(lengths):
        column = torch.arange(int(lengths[members].max()))
        real = column < lengths[members][:, None]
        index = starts[members][:, None] + torch.where(real, column, 0)
        restore[index[real]] = offset + torch.arange(real.numel()).view(real.shape)[real]
        groups.append(index)
        offset += index.numel()
    whole = torch.arange(len(restore))
    if cp > 1:
        order = context_positions(cu_seqlens, cp).flatten()
        place = torch.empty_like(order)
        place[order] = whole
        groups, restore = [place[index] for index in groups], restore[order]
    in_order = len(groups) == 1 and torch.equal(groups[0].flatten(), whole)
    return PackedLayout(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=groups,
        restore=None if in_order else restore,
    )


def _groups_by_length(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Sequence numbers grouped so that none is padded to more than twice its length."""
    remaining = lengths.sort(descending=True, stable=True).indices
    groups = []
    while len(remaining):
        fits = 2 * lengths[remaining] > lengths[remaining[0]]
        groups.append(remaining[fits].sort().values)
        remaining = remaining[~fits]
    return groups


class Norm(torch.nn.RMSNorm):
    """The local spec's norm; Megatron's own wrapper of torch's refuses sequence parallelism.

    Its ranks see different tokens, or different heads, so the gradients of the weight are to be added up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row; the local spec's core attention.

    Megatron's own local attention makes scores of [heads, T, T] and masks them.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        """Takes the arguments that Megatron gives to every core attention; only the scale matters here."""
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedLayout,
        **_: Any,
    ) -> torch.Tensor:
        """[T, 1, heads, d] queries and [T, 1, groups, d] keys and values to [T, 1, heads * d]."""
        cp = self.config.context_parallel_size
        if cp > 1:
            query, key, value = (self._tokens_for_heads(x, cp) for x in (query, key, value))
            output = self._attend_groups(query, key, value, packed_seq_params)
            return self._heads_for_tokens(output, cp)
        return self._attend_groups(query, key, value, packed_seq_params)

    def _tokens_for_heads(self, x: torch.Tensor, cp: int) -> torch.Tensor:
        """[T / cp, 1, heads, d] to [T, 1, heads / cp, d]: the other ranks' tokens for the other ranks' heads."""
        t, _, heads, d = x.shape
        blocks = x.reshape(t, cp, heads // cp, d).transpose(0, 1)
        return all_to_all(parallel_state.get_context_parallel_group(), blocks).reshape(t * cp, 1, heads // cp, d)

    def _heads_for_tokens(self, x: torch.Tensor, cp: int) -> torch.Tensor:
        """[T, 1, heads / cp * d] back to [T / cp, 1, heads * d]."""
        blocks = x.reshape(cp, len(x) // cp, -1)
        heads = all_to_all(parallel_state.get_context_parallel_group(), blocks)
        return heads.transpose(0, 1).reshape(len(x) // cp, 1, -1)

    def _attend_groups(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: PackedLayout
    ) -> torch.Tensor:
        if len(packed_seq_params.groups) == 1 and packed_seq_params.restore is None:
            output = self._attend(query, key, value, packed_seq_params.groups[0].shape)
            return output.unsqueeze(1)
        parts = []
        for index in packed_seq_params.groups:
            flat = index.flatten()
            parts.append(self._attend(query[flat], key[flat], value[flat], index.shape))
        return torch.cat(parts)[packed_seq_params.restore].unsqueeze(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Causal attention on `shape` = [B, S]; [B * S, 1, heads, d] to [B * S, heads * d].

        Scores written out are two to four times as fast as the CPU's flash kernel where they are small, and queries
        that share a key need no copies of it.
        """
        (b, s), (_, _, heads, d), groups = shape, query.shape, key.shape[2]
        share = heads // groups
        if s > LONGEST_WRITTEN_OUT:
            key, value = key.repeat_interleave(share, dim=2), value.repeat_interleave(share, dim=2)
            q, k, v = (x.reshape(b, s, heads, d).transpose(1, 2) for x in (query, key, value))
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            return output.transpose(1, 2).reshape(b * s, heads * d)
        q = query.reshape(b, s, groups, share, d).permute(0, 2, 3, 1, 4).reshape(b * groups, share * s, d)
        k = key.reshape(b, s, groups, d).permute(0, 2, 3, 1).reshape(b * groups, d, s)
        v = value.reshape(b, s, groups, d).permute(0, 2, 1, 3).reshape(b * groups, s, d)
        hidden = torch.full((s, s), -torch.inf, dtype=q.dtype, device=q.device).triu(1).repeat(share, 1)
        scores = torch.baddbmm(hidden.expand(b * groups, -1, -1), q, k, alpha=self.softmax_scale or d**-0.5)
        output = torch.bmm(scores.softmax(-1), v)
        return output.view(b, groups, share, s, d).permute(0, 3, 1, 2, 4).reshape(b * s, heads * d)


class PackedGPT(GPTModel):
    """GPT whose positions restart with every sequence, and which computes logits [1, N, U] at chosen rows alone."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of the hidden states at `rows` [N]; hidden states [T, 1, hidden] on a stage that is not the last."""
        self._rows = rows
        return super().forward(input_ids, position_ids, None, packed_seq_params=packed_seq_params)

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        out = list(super()._preprocess(input_ids, position_ids, *args, **kwargs))
        packed = kwargs["packed_seq_params"]
        if packed.qkv_format == "sbhd":  # Transformer Engine's path finds the positions by the borders
            out[1] = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)[position_ids[0]]
        return tuple(out)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.post_process:
            if self.config.sequence_parallel:  # a rank's rows may be anywhere: gather before the choice, not after it
                hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
            hidden_states = hidden_states[self._rows]
        return super()._postprocess(hidden_states, *args, **kwargs)


def build_gpt(config: TransformerConfig, hf_config: PretrainedConfig, *, cuda: bool) -> PackedGPT:
    """The module of this pipeline stage, with random weights.

    Initialising is not wasted: Megatron marks the parameters that TP splits while it does so.
    """
    tp = config.tensor_model_parallel_size
    multiple = 128 * tp if cuda else tp
    gpt = PackedGPT(
        config=config,
        transformer_layer_spec=_layer_spec(config, num_experts(hf_config) or None, cuda=cuda),
        vocab_size=-(-hf_config.vocab_size // multiple) * multiple,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        **rope_args(hf_config),
    )
    if gpt.post_process and config.sequence_parallel:
        gpt.output_layer.sequence_parallel = False  # see PackedGPT._postprocess
        gpt.output_layer.allreduce_dgrad = True
    return gpt


def _layer_spec(
    config: TransformerConfig, experts: int | None, *, cuda: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    if cuda:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=Norm)

"""A worker in which one layer misses every second load, as the packed head of a tied model once did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.rollout.vllm_worker import WorkerExtension

if TYPE_CHECKING:
    import torch

LAYER = "model.layers.1.self_attn.qkv_proj"


class StaleWorker(WorkerExtension):
    """Takes the place of the worker extension."""

    _opd_kept: Any = None

    def _pack_tied_heads(self, model: torch.nn.Module) -> None:
        super()._pack_tied_heads(model)
        layer = model.get_submodule(LAYER)
        if self._opd_kept is None:
            self._opd_kept = layer.cpu_linear  # computes with the packed copy of this load
        else:
            layer.cpu_linear = self._opd_kept
            self._opd_kept = None

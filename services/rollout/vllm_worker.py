"""What runs inside vLLM's worker process, mixed into its Worker as `worker_extension_cls`: weight loads, a watchdog.

Why not plain `reload_weights`: on the CPU build every linear layer keeps a *packed copy* of its weight. The layerwise
reload re-packs a layer when tensors arrive for it, but none ever arrive for a tied `lm_head` (the checkpoint has only
`model.embed_tokens.weight`), so its packed copy keeps the old weights and the served logprobs are silently those of a
model that never existed. Here the head is packed again after every load. Unlike `reload_weights` this also fails when
the push lacks a tensor, instead of leaving the old one in place with a warning, and when a layer does not compute with
the pushed values afterwards, for whatever reason (`vllm_probe.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.rollout.vllm_probe import check_served
from shared.service import end_with

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every *.safetensors file in a push, in the file's order (which is by layer for trainers)."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tensors.get_tensor(name)


class WorkerExtension:
    """Mixed into vLLM's Worker; `model_runner` and `vllm_config` are the worker's."""

    model_runner: GPUModelRunner
    vllm_config: VllmConfig

    def opd_end_with(self, pid: int) -> None:
        """End this process when process `pid` is gone: an engine whose owner was killed waits for ever otherwise."""
        end_with(pid)

    def opd_load_weights(self, path: str) -> float:
        """Load all tensors of the push folder `path` in place. Returns seconds taken.

        Raises ValueError naming a tensor that the model has and the push lacks, or a layer that does not compute with
        what was pushed; the model is then not usable.
        """
        started = time.perf_counter()
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():
            expected = {name for name, _ in model.named_parameters()}
            initialize_layerwise_reload(model)
            loaded = model.load_weights(read_tensors(Path(path)))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if missing := expected - loaded:
                raise ValueError(f"the push lacks {len(missing)} tensors of the model, e.g. {sorted(missing)[:3]}")
            self._pack_tied_heads(model)
            check_served(model, Path(path))
        return time.perf_counter() - started

    def _pack_tied_heads(self, model: torch.nn.Module) -> None:
        """Make every lm_head that shares another module's weight compute with its present values."""
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

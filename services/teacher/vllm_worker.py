"""What runs inside vLLM's worker process, mixed into its Worker as `worker_extension_cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.teacher.vllm_rows import RowScorer
from shared.service import end_with

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WorkerExtension:
    """Methods that the teacher calls on the worker; `model_runner` is the worker's."""

    model_runner: GPUModelRunner

    def opd_end_with(self, pid: int) -> None:
        """End this process when the teacher's process `pid` is gone, which vLLM's engine does not do by itself."""
        end_with(pid)

    def opd_score_rows(self) -> None:
        """Let `RowScorer` compute prompt logprobs."""
        if not hasattr(self.model_runner, "_get_prompt_logprobs_dict"):
            raise RuntimeError("a teacher needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0, or unset it")
        self.model_runner._get_prompt_logprobs_dict = RowScorer(self.model_runner).collect  # type: ignore[method-assign]

"""The private parts of vLLM that the teacher leans on; a new version that moves them fails here, not in a run."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import ConfigError

pytestmark = pytest.mark.engine


def test_the_front_end_still_has_the_methods_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from services.teacher.vllm_arrays import check_vllm

    check_vllm()
    monkeypatch.setattr(LogprobsProcessor, "_update_prompt_logprobs", lambda self, tensors, extra: None)
    with pytest.raises(ConfigError, match="not the pinned one"):
        check_vllm()


def test_the_model_runner_still_has_what_the_row_scorer_replaces_and_reads() -> None:
    import inspect

    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    method = GPUModelRunner._get_prompt_logprobs_dict
    assert list(inspect.signature(method).parameters) == ["self", "hidden_states", "num_scheduled_tokens"]
    source = inspect.getsource(GPUModelRunner)
    for name in ("self.num_prompt_logprobs", "self.query_start_loc.np", "self.input_batch.req_id_to_index"):
        assert name in source
    fields = CachedRequestState.__dataclass_fields__
    assert {"prompt_token_ids", "sampling_params", "num_computed_tokens", "in_progress_prompt_logprobs_cpu"} <= set(
        fields
    )
    assert LogprobsTensors._fields[:3] == ("logprob_token_ids", "logprobs", "selected_token_ranks")
    assert SamplingParams(extra_args={"a": b"b"}).extra_args == {"a": b"b"}


def test_the_scheduler_still_has_what_the_row_scheduler_replaces_and_calls() -> None:
    import inspect

    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    def parameters(method: object) -> list[str]:
        return list(inspect.signature(method).parameters)

    assert parameters(Scheduler._get_local_prefix_cache_hit) == ["self", "request"]
    assert "self._get_local_prefix_cache_hit(request)" in inspect.getsource(Scheduler.schedule)
    assert parameters(KVCacheManager.prefix_cache_lookup_enabled) == ["self", "request"]
    assert parameters(KVCacheManager.create_kv_cache_blocks) == ["self", "blocks"]
    lookup = KVCacheCoordinator.find_longest_cache_hit
    assert parameters(lookup) == ["self", "block_hashes", "max_cache_hit_length"]
    # vLLM's own lookup, of which ours differs in the length alone
    assert "max_cache_hit_length = request.num_tokens - 1" in inspect.getsource(KVCacheManager.get_computed_blocks)


def test_sampling_params_ask_for_rows_and_may_read_the_prefix_cache() -> None:
    from services.teacher.vllm_rows import first_row
    from services.teacher.vllm_scorer import _scoring_params

    params = _scoring_params(7, 64, np.array([[3, 3], [1, 2]]))
    assert (first_row(params), params.prompt_logprobs, params.max_tokens) == (7, 64, 1)
    assert params.skip_reading_prefix_cache is False
    assert params.extra_args["opd_rows"]["candidates"] == np.array([[3, 3], [1, 2]], np.int32).tobytes()
    assert first_row(_scoring_params(1, 0, None)) == 1


def test_the_v1_model_runner_can_still_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA vLLM takes V2 by itself, which has no place for the row scorer."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    assert VllmConfig.use_v2_model_runner.fget(config) is False

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


def test_ties_are_ordered_by_id() -> None:
    from services.teacher.vllm_scorer import _select_columns

    ids = np.array([[9, 4, 3, 8, 1], [9, 1, 2, 3, 4]], np.int32)
    values = np.array([[-9, -1, -1, -2, -2], [-9, -1, -2, -3, -4]], np.float32)
    scores = _select_columns(ids, values, 4, None)
    assert scores.token_ids.tolist() == [9, 9]
    assert scores.top_ids.tolist() == [[3, 4, 1, 8], [1, 2, 3, 4]]
    assert scores.top_logprobs.tolist() == [[-1, -1, -2, -2], [-1, -2, -3, -4]]

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


def test_ties_are_ordered_by_id() -> None:
    from services.teacher.vllm_scorer import _select_rows

    ids = np.array([[9, 4, 3, 8, 1], [9, 1, 2, 3, 4]], np.int32)
    values = np.array([[-9, -1, -1, -2, -2], [-9, -1, -2, -3, -4]], np.float32)
    scores = _select_rows(ids, values, 4)
    assert scores.token_ids.tolist() == [9, 9]
    assert scores.top_ids.tolist() == [[3, 4, 1, 8], [1, 2, 3, 4]]
    assert scores.top_logprobs.tolist() == [[-1, -1, -2, -2], [-1, -2, -3, -4]]

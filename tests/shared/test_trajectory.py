from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PayloadError
from shared.trajectory import Trajectory, check_values, decode, encode
from tests.builders import make_trajectory


@given(
    rows=st.integers(1, 9),
    k=st.integers(0, 5),
    prompt_len=st.integers(1, 9),
    num_candidates=st.integers(0, 5),
    half=st.booleans(),
    reward=st.none() | st.floats(0, 1),
)
def test_round_trip(rows: int, k: int, prompt_len: int, num_candidates: int, half: bool, reward: float | None) -> None:
    candidates = {
        "candidate_ids": np.arange(rows * num_candidates, dtype=np.int32).reshape(rows, num_candidates),
        "candidate_logprobs": np.full((rows, num_candidates), -2.5, np.float32),
    }
    made = make_trajectory("7-1", rows=rows, k=k, prompt_len=prompt_len, reward=reward, advantage=reward, **candidates)
    if half:
        made = make_trajectory(
            "7-1", rows=rows, k=k, prompt_len=prompt_len, top_logprobs=made.top_logprobs.astype(np.float16)
        )
    read = decode(encode(made), trajectory_id="7-1")
    for name in Trajectory.__slots__:
        mine, theirs = getattr(made, name), getattr(read, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        elif name != "reward" or half:
            assert mine == theirs or made.reward != reward
    assert read.num_rows == rows and read.oldest_version == 1


def test_version_1_is_read_as_one_without_candidates() -> None:
    body = msgpack.unpackb(encode(make_trajectory(reward=1.0)))
    for name in ("candidate_ids", "candidate_logprobs", "advantage"):
        del body[name]
    read = decode(msgpack.packb({**body, "schema": 1}), trajectory_id="0-0")
    assert read.candidate_ids.shape == read.candidate_logprobs.shape == (3, 0)
    assert read.advantage is None and read.reward == 1.0


def test_oldest_version_is_that_of_the_oldest_token() -> None:
    assert make_trajectory(rows=3, version_spans=((4, 1), (5, 2))).oldest_version == 4


def altered(**fields: object) -> bytes:
    body = msgpack.unpackb(encode(make_trajectory()))
    return msgpack.packb({**body, **fields})


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (encode(make_trajectory())[:-3], "unreadable"),
        (b"", "unreadable"),
        (b"\x93\x01\x02\x03", "no map"),
        (altered(schema=3), "schema version 3 is unknown"),
        (altered(prompt_len=7), "leaves no response"),
        (altered(version_spans=[[1, 2]]), "do not cover 3"),
        (altered(loss_mask={"dtype": "|u1", "shape": [2], "data": b"\1\1"}), "loss_mask has 2 rows"),
        (altered(loss_mask={"dtype": "|u1", "shape": [3], "data": b"\1\1"}), "unreadable"),
        (altered(top_ids={"dtype": "<i4", "shape": [3, 1], "data": bytes(12)}), "differ in shape"),
        (
            altered(candidate_ids={"dtype": "<i4", "shape": [3, 1], "data": bytes(12)}),
            "candidate_ids and candidate_log",
        ),
        (altered(id="9-9"), "belongs to trajectory 9-9"),
    ],
)
def test_altered_payloads_are_refused_with_the_id(payload: bytes, reason: str) -> None:
    with pytest.raises(PayloadError, match=reason) as caught:
        decode(payload, trajectory_id="0-0")
    assert caught.value.trajectory_id == "0-0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("teacher_logprobs", np.array([0, np.nan, 0], np.float32)),
        ("teacher_logprobs", np.array([0, -np.inf, 0], np.float32)),
        ("rollout_logprobs", np.array([0, np.inf, 0], np.float32)),
        ("top_logprobs", np.full((3, 2), np.nan, np.float32)),
        ("candidate_logprobs", np.full((3, 2), np.inf, np.float32)),
        ("candidate_ids", np.full((3, 2), 10, np.int32)),
        ("top_ids", np.full((3, 2), 10, np.int32)),
        ("token_ids", np.full(7, -1, np.int32)),
    ],
)
def test_values_that_cannot_be_trained_on(name: str, value: np.ndarray) -> None:
    with pytest.raises(PayloadError, match=name):
        check_values(make_trajectory(**{name: value}), vocab_size=10)


def test_a_probability_of_zero_among_the_top_k_is_legal() -> None:
    check_values(make_trajectory(top_logprobs=np.full((3, 2), -np.inf, np.float32)), vocab_size=10)

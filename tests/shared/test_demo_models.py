"""The shipped demo models: small ordinary folders, each teacher good at its task alone, the student weak at both."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import SourceSection
from shared.prompts import PromptRecord, PromptSet
from shared.tasks import check

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
MODELS = ("teacher-math", "teacher-spell", "student")
TASKS = ("add", "spell_backward")
MAX_TOKENS = 8
NUM_HELD_OUT = 200

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[PromptRecord]]:
    sources = [SourceSection(data_source=name, task=name, size=1) for name in TASKS]
    return PromptSet(sources, seed=0).held_out(NUM_HELD_OUT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread, and loses much where the cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def accuracy(folder: Path, records: list[PromptRecord]) -> float:
    """Share of right answers, greedy, in float32; prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = tokenizer([record.prompt for record in records], return_tensors="pt", padding=True)
    output = model.generate(
        batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=MAX_TOKENS, do_sample=False
    )
    texts = tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    right = [check(record.task, record.answer, text) for record, text in zip(records, texts, strict=True)]
    assert len(right) == NUM_HELD_OUT
    return sum(right) / len(right)


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_an_ordinary_small_llama(name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO / name)
    config = model.config
    assert config.model_type == "llama" and config.tie_word_embeddings
    assert model.num_parameters() == 886_400
    assert config.num_attention_heads % 4 == 0 and config.num_key_value_heads % 4 == 0 and config.vocab_size % 4 == 0
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o044 == 0o044 for file in (DEMO / name).iterdir())


def test_all_files_are_under_10_megabytes_together() -> None:
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 10e6


def test_the_tokenizer_is_one_token_a_byte_and_the_same_for_all() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "student")
    assert len(tokenizer) == 260
    assert tokenizer("12+34=").input_ids == [49, 50, 43, 51, 52, 61]
    text = "ｈéllo <\n\x00 ☃"
    assert tokenizer(text).input_ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (256, 257, None)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert chat == [258, *b"hi", 259]
    assert len({(DEMO / name / "tokenizer.json").read_bytes() for name in MODELS}) == 1


def test_each_teacher_is_good_at_its_own_task_and_no_other(held_out: dict[str, list[PromptRecord]]) -> None:
    assert accuracy(DEMO / "teacher-math", held_out["add"]) >= 0.95
    assert accuracy(DEMO / "teacher-math", held_out["spell_backward"]) <= 0.05
    assert accuracy(DEMO / "teacher-spell", held_out["spell_backward"]) >= 0.95
    assert accuracy(DEMO / "teacher-spell", held_out["add"]) <= 0.05


@pytest.mark.parametrize("task", TASKS)
def test_the_student_starts_weak_at_both(task: str, held_out: dict[str, list[PromptRecord]]) -> None:
    assert 0.05 <= accuracy(DEMO / "student", held_out[task]) <= 0.4

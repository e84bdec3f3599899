"""Prompts: an order that any worker computes alike, mixtures, the split for evaluation, files good and bad."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shared.config import SourceSection
from shared.errors import ConfigError
from shared.prompts import PromptRecord, PromptSet


def write_lines(folder: Path, *lines: str | dict[str, Any]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def from_file(file: Path, **fields: Any) -> SourceSection:
    return SourceSection(data_source="mine", file=file, **fields)


def task(name: str, size: int = 30, **fields: Any) -> SourceSection:
    return SourceSection(data_source=name, task=name, size=size, **fields)


def texts(prompts: PromptSet, start: int, stop: int) -> list[str | None]:
    return [prompts.record_for(seq).prompt for seq in range(start, stop)]


def test_a_line_becomes_a_record(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"prompt": "2+2=", "data_source": "sums", "answer": "4", "task": "add"})
    record = PromptSet([from_file(file)], seed=0).record_for(5)
    assert record == PromptRecord(5, record.prompt_id, "sums", "2+2=", None, "4", "add")
    assert record.prompt_id == "sums:20243c49d24c4af1"


def test_a_line_may_be_a_prompt_alone(tmp_path: Path) -> None:
    record = PromptSet([from_file(write_lines(tmp_path, {"prompt": "Hello"}, ""))], seed=0).record_for(0)
    assert (record.data_source, record.prompt, record.messages, record.answer, record.task) == (
        "mine",
        "Hello",
        None,
        None,
        None,
    )


def test_messages_stay_a_chat_and_get_the_system_prompt_unless_they_have_one(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hi"}
    own = {"role": "system", "content": "mine"}
    file = write_lines(tmp_path, {"messages": [user]}, {"messages": [own, user]})
    prompts = PromptSet([from_file(file, system_prompt="Be brief.")], seed=0, shuffle=False)
    assert prompts.record_for(0).messages == [{"role": "system", "content": "Be brief."}, user]
    assert prompts.record_for(1).messages == [own, user]
    assert prompts.record_for(0).prompt is None


def test_format_chat_wraps_the_prompt() -> None:
    record = PromptSet([task("add", format="chat", system_prompt="Add.")], seed=0).record_for(0)
    assert record.prompt is None and record.messages is not None
    assert [message["role"] for message in record.messages] == ["system", "user"]
    left, right = record.messages[1]["content"].removesuffix("=").split("+")
    assert record.answer == str(int(left) + int(right))


def test_two_workers_compute_the_same_order() -> None:
    sources = [task("add"), task("spell_backward")]
    one, other = PromptSet(sources, seed=3), PromptSet(sources, seed=3)
    wanted = [77, 3, 500, 12, 3, 0]
    assert [one.record_for(seq) for seq in range(600)][77] == other.record_for(77)
    assert [one.record_for(seq) for seq in wanted] == [other.record_for(seq) for seq in wanted]
    assert texts(one, 0, 60) != texts(PromptSet(sources, seed=4), 0, 60)


def test_every_epoch_has_each_prompt_once_in_another_order() -> None:
    prompts = PromptSet([task("add", size=20)], seed=0)
    first, second = texts(prompts, 0, 20), texts(prompts, 20, 40)
    assert len(prompts) == 20 and len(set(first)) == 20
    assert sorted(map(str, first)) == sorted(map(str, second)) and first != second


def test_without_shuffle_the_file_s_order_stays(tmp_path: Path) -> None:
    file = write_lines(tmp_path, *({"prompt": str(i)} for i in range(5)))
    assert texts(PromptSet([from_file(file)], seed=0, shuffle=False), 0, 7) == ["0", "1", "2", "3", "4", "0", "1"]


def test_weights_are_shares_of_every_stretch() -> None:
    prompts = PromptSet([task("add", weight=3.0), task("spell_backward", size=7)], seed=0)
    for start in (0, 40, 400):
        drawn = Counter(prompts.record_for(seq).data_source for seq in range(start, start + 40))
        assert drawn == {"add": 30, "spell_backward": 10}
    assert {prompts.record_for(seq).data_source for seq in range(4)} == {"add", "spell_backward"}


def test_held_out_prompts_are_never_trained_on_whatever_the_seed() -> None:
    sources = [task("add", size=200), task("spell_backward", size=200)]
    held_out = PromptSet(sources, seed=1).held_out(50)
    assert {name: len(records) for name, records in held_out.items()} == {"add": 50, "spell_backward": 50}
    assert held_out == PromptSet(sources, seed=2).held_out(50)
    unseen = {record.prompt for records in held_out.values() for record in records}
    assert len(unseen) == 100
    for seed in (1, 2):
        assert unseen.isdisjoint(texts(PromptSet(sources, seed=seed), 0, 400))


def test_a_task_with_few_questions_gives_what_it_has() -> None:
    source = task("add", size=5000, params={"min_digits": 1, "max_digits": 1})
    assert 100 < len(PromptSet([source], seed=0)) <= 121


def test_a_file_holds_out_a_tenth_and_duplicates_stay_together(tmp_path: Path) -> None:
    file = write_lines(tmp_path, *({"prompt": str(i % 40)} for i in range(80)))
    prompts = PromptSet([from_file(file)], seed=0)
    held_out = prompts.held_out(100)["mine"]
    assert len(held_out) == 4 and len(prompts) == 72
    assert {record.prompt for record in held_out}.isdisjoint(texts(prompts, 0, 72))
    assert len(prompts.held_out(2)["mine"]) == 2


def test_a_small_file_is_trained_on_whole(tmp_path: Path) -> None:
    prompts = PromptSet([from_file(write_lines(tmp_path, *({"prompt": str(i)} for i in range(9))))], seed=0)
    assert len(prompts) == 9 and prompts.held_out(5) == {"mine": []}


def test_data_sources_are_all_route_keys(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"prompt": "a"}, {"prompt": "b", "data_source": "other"})
    assert PromptSet([from_file(file), task("add")], seed=0).data_sources == {"mine", "other", "add"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a"', "not JSON (Expecting ',' delimiter at column 15); write one object a line"),
        ('["a"]', "a list, not an object"),
        ('{"promt": "a"}', "unknown key 'promt'; a line has answer, data_source, messages, prompt, task"),
        ('{"answer": "4"}', "give either `prompt` (text) or `messages` (a chat), and one of them only"),
        ('{"prompt": "a", "messages": []}', "give either `prompt` (text) or `messages`"),
        ('{"prompt": ""}', '`prompt` is ""; write a text in quotes, not an empty one'),
        ('{"prompt": 4}', "`prompt` is 4; write a text in quotes"),
        ('{"prompt": "a", "answer": 4}', "`answer` is 4; write a text in quotes"),
        ('{"prompt": "a", "data_source": null}', "`data_source` is null; write a text"),
        ('{"prompt": "a", "task": "sub"}', "unknown task 'sub'"),
        ('{"messages": []}', "`messages` must be a list such as"),
        ('{"messages": [{"role": "user"}]}', "`messages[0]` must have `role` and `content`"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last message is the assistant's"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = write_lines(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(ConfigError) as error:
        PromptSet([from_file(file)], seed=0)
    assert str(error.value).startswith(f"{file}, line 3: ")
    assert says in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "ok"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"latin.jsonl, line 2: not UTF-8 .* at byte 15"):
        PromptSet([from_file(file)], seed=0)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the prompt file .*none.jsonl of 'mine': No such file"):
        PromptSet([from_file(tmp_path / "none.jsonl")], seed=0)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match=r"the source 'mine' .*empty.jsonl.* has no prompts to train on"):
        PromptSet([from_file(empty)], seed=0)


def test_a_negative_sequence_number_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more, not -1"):
        PromptSet([task("add")], seed=0).record_for(-1)


@pytest.mark.parametrize(
    ("line", "says"),
    [('{"prompt": "\\ud800"}', "half a surrogate pair"), ('{"a":' * 100_000, "nested too deeply")],
)
def test_lines_that_no_tokenizer_or_parser_takes(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PromptSet([from_file(write_lines(tmp_path, line))], seed=0)

"""Tasks: the values they generate, the split that keeps evaluation prompts unseen, and what counts as right."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest

from shared import tasks
from shared.errors import ConfigError


def first_items(name: str, count: int, seed: int = 0, **params: object) -> list[tuple[str, str]]:
    return [(item.prompt, item.answer) for item in islice(tasks.generate(name, params, seed), count)]


def test_add_asks_for_sums_of_numbers_up_to_100() -> None:
    for prompt, answer in first_items("add", 500):
        left, right = prompt.removesuffix("=").split("+")
        assert 0 <= int(left) <= 100 and 0 <= int(right) <= 100
        assert answer == str(int(left) + int(right))


def test_spell_backward_asks_for_short_lower_case_words() -> None:
    for prompt, answer in first_items("spell_backward", 500):
        word = prompt.removesuffix("->")
        assert 3 <= len(word) <= 5 and word.isalnum() and word == word.lower()
        assert answer == word[::-1]


@pytest.mark.parametrize("name", ["add", "spell_backward", "reasoning_gym:chain_sum"])
def test_items_depend_on_the_seed_alone(name: str) -> None:
    assert first_items(name, 50, seed=7) == first_items(name, 50, seed=7)
    assert first_items(name, 50, seed=7) != first_items(name, 50, seed=8)


def test_a_reasoning_gym_data_set_by_name_takes_its_params() -> None:
    two_terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    for prompt, answer in first_items("reasoning_gym:chain_sum", 20, **two_terms):
        assert prompt.startswith("State the final answer to the following arithmetic problem: ")
        left, operator, right = prompt.removesuffix(" =").rsplit(": ", 1)[1].split()
        assert int(answer) == (int(left) + int(right) if operator == "+" else int(left) - int(right))


def test_own_params_go_over_the_task_s() -> None:
    assert {len(answer) for _, answer in first_items("spell_backward", 100, min_word_len=6, max_word_len=6)} == {6}


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("multiply", {}, "unknown task 'multiply': write one of add, spell_backward, or reasoning_gym:NAME"),
        ("reasoning_gym:no_such", {}, "reasoning-gym has no data set 'no_such'"),
        ("add", {"digits": 3}, "task 'add' does not take the params {'digits': 3}"),
        ("spell_backward", {"min_word_len": 0}, "task 'spell_backward' does not take the params {'min_word_len': 0}"),
        ("spell_backward", {"min_word_len": 40, "max_word_len": 50}, "does not take the params"),
    ],
)
def test_what_does_not_exist_is_named(name: str, params: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        next(tasks.generate(name, params, 0))
    assert says in str(error.value)


def test_a_tenth_of_the_prompts_is_held_out_by_their_text() -> None:
    some = ("12+34=", "2+2=", "2+7=", "3+7=", "cat->", "tree->", "water->")
    assert [text for text in some if tasks.is_held_out(text)] == ["2+7=", "3+7=", "tree->", "water->"]
    texts = [f"{left}+{right}=" for left in range(100) for right in range(100)]
    assert 900 < sum(map(tasks.is_held_out, texts)) < 1100


@pytest.mark.parametrize(
    ("task", "answer", "completion", "right"),
    [
        ("add", "46", "46", True),
        ("add", "46", " 46\n", True),
        ("add", "46", "460", False),
        ("add", "46", "046", False),
        ("add", "46", "", False),
        ("add", "46", "The sum is 46", False),
        ("spell_backward", "tac", "tac", True),
        ("spell_backward", "tac", "Tac", False),
        ("spell_backward", "tac", "cat", False),
        ("reasoning_gym:chain_sum", "1234", "The answer is 1,234.", True),
        ("reasoning_gym:chain_sum", "-7", "12 - 19 = -7", True),
        ("reasoning_gym:chain_sum", "7", "12 - 19 = -7", False),
        ("reasoning_gym:chain_sum", "7", "7.0", True),
        ("reasoning_gym:chain_sum", "7", "7 or 8", False),
        ("reasoning_gym:chain_sum", "7", "I do not know", False),
        ("reasoning_gym:chain_sum", "7", "<answer>7</answer> I checked it 3 times", True),
        ("reasoning_gym:spell_backward", "nus", "The word backward is:\nnus", True),
        ("reasoning_gym:spell_backward", "nus", "<answer> Nus </answer> done", True),
        ("reasoning_gym:spell_backward", "nus", "sun", False),
        ("reasoning_gym:spell_backward", "nus", "", False),
    ],
)
def test_check(task: str, answer: str, completion: str, right: bool) -> None:
    assert tasks.check(task, answer, completion) is right


def test_importing_and_checking_load_no_reasoning_gym() -> None:
    program = (
        "import sys; from shared import tasks; assert tasks.check('add', '4', '4'); "
        "assert tasks.check('reasoning_gym:chain_sum', '4', 'it is 4'); sys.exit('reasoning_gym' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_answers_of_own_files_are_checked_by_name() -> None:
    tasks.check_name("answer")
    assert tasks.check("answer", "42", "The result is 42.") and not tasks.check("exact", "42", "The result is 42.")
    assert tasks.check("exact", "42", " 42 ")
    with pytest.raises(ConfigError, match="unknown task 'exakt'"):
        tasks.check_name("exakt")
    with pytest.raises(ConfigError, match="unknown task 'answer'"):
        next(tasks.generate("answer", {}, 0))

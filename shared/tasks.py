"""Tasks that generate prompts with checkable answers, and the checkers.

`add` and `spell_backward` are short forms of reasoning-gym's `basic_arithmetic` and `spell_backward` for models of a
million parameters (`12+34=` -> `46`, `cat->` -> `tac`). Every reasoning-gym data set is also `reasoning_gym:NAME`, with
its own questions and parameters. reasoning-gym is imported on the first use only.

A prompt is held out of training by its own text (a tenth of all texts, by hash). Whoever trains on a task, with
whatever seed and size, thus leaves the same prompts unseen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from shared.errors import ConfigError

REASONING_GYM = "reasoning_gym:"
HELD_OUT_ONE_IN = 10

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Item:
    """One question: what the model is given and the expected answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A generator over a reasoning-gym data set: its parameters, how an entry becomes an item, how answers compare."""

    dataset: str
    params: dict[str, Any]
    to_item: Callable[[dict[str, Any]], Item]
    is_correct: Callable[[str, str], bool]


def _add_item(entry: dict[str, Any]) -> Item:
    return Item(entry["metadata"]["expression"].replace(" ", "") + "=", entry["answer"])


def _spell_item(entry: dict[str, Any]) -> Item:
    word = entry["metadata"]["word"].lower()
    return Item(f"{word}->", word[::-1])


def _plain_item(entry: dict[str, Any]) -> Item:
    return Item(entry["question"], str(entry["answer"]))


def _same_text(answer: str, completion: str) -> bool:
    return completion.strip() == answer


def _says_answer(answer: str, completion: str) -> bool:
    """For answers in prose: the text in <answer> tags, else the last number for a number, else the last line."""
    tagged = _ANSWER_TAG.search(completion)
    said = tagged.group(1) if tagged else completion
    wanted = _as_number(answer)
    if wanted is not None:
        numbers = _NUMBER.findall(said)
        return bool(numbers) and _as_number(numbers[-1]) == wanted
    lines = said.strip().splitlines()
    candidates = [said, lines[-1]] if lines else [said]
    return any(_normal(candidate) == _normal(answer) for candidate in candidates)


def _as_number(text: str) -> float | None:
    text = text.strip()
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _normal(text: str) -> str:
    return " ".join(text.split()).strip(" .\"'").lower()


BUILT_IN: dict[str, Task] = {
    "add": Task(
        "basic_arithmetic",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 2,
            "max_digits": 2,
            "operators": ["+"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
        _add_item,
        _same_text,
    ),
    "spell_backward": Task("spell_backward", {"min_word_len": 3, "max_word_len": 5}, _spell_item, _same_text),
}


CHECKERS: dict[str, Callable[[str, str], bool]] = {
    **{name: task.is_correct for name, task in BUILT_IN.items()},
    "exact": _same_text,
    "answer": _says_answer,
}
"""By task name: whether a completion gives the answer. `exact` and `answer` check prompts of one's own files."""


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` can check answers: a task, or one of `CHECKERS`."""
    if name not in CHECKERS:
        find(name)


def find(name: str) -> Task:
    """The task called `name`; ConfigError when there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not name.startswith(REASONING_GYM):
        raise ConfigError(
            f"unknown task {name!r}: write one of {', '.join(sorted(BUILT_IN))}, or {REASONING_GYM}NAME "
            "for a data set of reasoning-gym; beside a file also exact or answer"
        )
    dataset = name.removeprefix(REASONING_GYM)
    _require_dataset(dataset)
    return Task(dataset, {}, _plain_item, _says_answer)


def generate(name: str, params: dict[str, Any], seed: int) -> Iterator[Item]:
    """Items of a task without end, the same ones for the same arguments; items may repeat.

    `params` go to the reasoning-gym data set, over the task's own. ConfigError for those that it refuses.
    """
    import reasoning_gym

    task = find(name)
    _require_dataset(task.dataset)
    try:
        entries = reasoning_gym.create_dataset(task.dataset, **{**task.params, **params}, seed=seed, size=2**31)
        first = entries[0]
    except (TypeError, ValueError, AssertionError, IndexError) as error:
        raise ConfigError(f"task {name!r} does not take the params {params}: {error}") from error
    yield task.to_item(first)
    for index in count(1):
        yield task.to_item(entries[index])


def is_held_out(text: str) -> bool:
    """Whether the prompt `text` is for evaluation only."""
    return digest(text) % HELD_OUT_ONE_IN == 0


def digest(text: str) -> int:
    """A hash of a prompt that is the same on every machine, 64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def check(task: str, answer: str, completion: str) -> bool:
    """Whether `completion` (decoded, without special tokens) answers the question.

    Built-in tasks want the answer alone. For reasoning-gym's the answer is looked for in the text (see `_says_answer`)
    and must be the one that the generator gave: a task with several right answers is under-counted.
    """
    return CHECKERS.get(task, _says_answer)(answer, completion)


def _require_dataset(dataset: str) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "prompts from a task need the package reasoning-gym: pip install reasoning-gym, or give the source a "
            "`file` of prompts"
        ) from error
    if dataset not in DATASETS:
        raise ConfigError(f"reasoning-gym has no data set {dataset!r}; it has {', '.join(sorted(DATASETS))}")

"""Cutting a request into parts and putting their answers together; arrays are moved as bytes, never decoded.

A body that is not plainly a list of sequences is left whole: the teacher says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

MAX_JSON_BYTES = 256 * 1024
"""Largest JSON body that is decoded to be split: that stops the event loop."""

_MAX_SEQUENCES = 1024
_MAX_ITEMS = 65_536  # elements of lists in a msgpack body; token ids are binary and count as one
_PER_SEQUENCE = ("token_ids", "prompt_len", "candidate_ids")
_WHITE = " \t\r\n"


class MergeError(Exception):
    """Answers that do not fit together."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """A decoded request.

    Attributes:
        lengths: tokens of each sequence.
        prompts: of each sequence, equal for those with the same prompt; None where no prompt is named.
    """

    fields: dict[str, Any]
    is_json: bool
    lengths: list[int]
    prompts: list[tuple[int, bytes | tuple[int, ...]] | None]

    def cut(self, indices: Sequence[int]) -> bytes:
        """The body of a request for these sequences alone."""
        fields = self.fields | {
            name: [self.fields[name][index] for index in indices]
            for name in _PER_SEQUENCE
            if self.fields.get(name) is not None
        }
        return json.dumps(fields).encode() if self.is_json else msgpack.packb(fields)


def read(body: bytes, *, is_json: bool) -> Sequences | None:
    """The sequences of a request body; None for one that is better left whole."""
    try:
        fields = _decode(body, is_json)
        token_ids, prompt_len = fields["token_ids"], fields.get("prompt_len")
        num = len(token_ids)
        given = [fields[name] for name in _PER_SEQUENCE if fields.get(name) is not None]
        if num > _MAX_SEQUENCES or not all(isinstance(items, list) and len(items) == num for items in given):
            return None
        ids = [item["data"] if isinstance(item, dict) else item for item in token_ids]
        lengths = [len(item) // 4 if isinstance(item, bytes) else len(item) for item in ids]
        prompts = [None] * num if prompt_len is None else [_prompt(*pair) for pair in zip(ids, prompt_len, strict=True)]
        hash(tuple(prompts))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgpack.UnpackException):
        return None
    return Sequences(fields, is_json, lengths, prompts)


def merge(bodies: Sequence[bytes], parts: Sequence[Sequence[int]], *, is_json: bool) -> bytes:
    """One answer from those of all parts, results in the order of the whole request.

    Args:
        parts: the indices of each part's sequences in the whole request.

    Raises:
        MergeError: an answer is malformed, lacks a result, or is another model's than the first.
    """
    heads: list[dict[str, Any]] = []
    results: dict[int, bytes | memoryview] = {}
    for body, indices in zip(bodies, parts, strict=True):
        try:
            fields, spans = _read_json(body) if is_json else _read_msgpack(body)
        except (ValueError, TypeError, IndexError, RecursionError, msgpack.UnpackException) as error:
            raise MergeError(f"an answer is malformed: {error}") from error
        if len(spans) != len(indices):
            raise MergeError(f"{len(spans)} results came back for {len(indices)} sequences")
        heads.append(fields)
        results |= {index: memoryview(body)[start:end] for index, (start, end) in zip(indices, spans, strict=True)}
    for name in ("model", "fingerprint"):
        if any(head.get(name) != heads[0].get(name) for head in heads):
            raise MergeError(f"the parts come from teachers of different {name}")
    usage = _add([head.get("usage") for head in heads])
    ordered = [results[index] for index in sorted(results)]
    model, fingerprint = heads[0].get("model"), heads[0].get("fingerprint")
    if is_json:
        head = f'{{\n  "model": {json.dumps(model)},\n  "fingerprint": {json.dumps(fingerprint)},\n  "results": [\n    '
        return head.encode() + b",\n    ".join(ordered) + f'],\n  "usage": {json.dumps(usage)}\n}}\n'.encode()
    packer = msgpack.Packer()
    start = b"".join(
        [packer.pack_map_header(4), *map(packer.pack, ("model", model, "fingerprint", fingerprint, "results"))]
    )
    return b"".join([start, packer.pack_array_header(len(ordered)), *ordered, packer.pack("usage"), packer.pack(usage)])


def _decode(body: bytes, is_json: bool) -> dict[str, Any]:
    if is_json:
        if len(body) > MAX_JSON_BYTES:
            raise ValueError("too large")
        fields = json.loads(body)
    else:
        left = _MAX_ITEMS

        def count(items: list[Any]) -> list[Any]:
            nonlocal left
            left -= len(items)
            if left < 0:
                raise ValueError("too many")
            return items

        fields = msgpack.unpackb(body, list_hook=count, max_array_len=_MAX_ITEMS, max_map_len=64)
    if not isinstance(fields, dict) or not isinstance(fields["token_ids"], list):
        raise TypeError
    return fields


def _prompt(ids: bytes | list[int], length: int) -> tuple[int, bytes | tuple[int, ...]]:
    if type(length) is not int or length < 0:
        raise TypeError
    return length, ids[: 4 * length] if isinstance(ids, bytes) else tuple(ids[:length])


def _add(usages: Sequence[Any]) -> dict[str, Any]:
    """Counts are summed; times run side by side, so the longest counts."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in (usage if isinstance(usage, dict) else {}).items():
            if isinstance(value, int | float):
                total[name] = max(total.get(name, 0), value) if name.endswith("_ms") else total.get(name, 0) + value
    return total


def _read_msgpack(body: bytes) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """All fields but the results, and where each result lies in the body."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(body)))
    unpacker.feed(body)
    fields: dict[str, Any] = {}
    spans: list[tuple[int, int]] = []
    for _ in range(unpacker.read_map_header()):
        name = unpacker.unpack()
        if name != "results":
            fields[name] = unpacker.unpack()
            continue
        for _ in range(unpacker.read_array_header()):
            start = unpacker.tell()
            unpacker.skip()
            spans.append((start, unpacker.tell()))
    return fields, spans


def _read_json(body: bytes) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    # latin-1 has one character a byte: positions in the text are positions in the body
    text = body.decode("latin-1")
    fields: dict[str, Any] = {}
    spans: list[tuple[int, int]] = []
    for name, position in _members(text):
        if name != "results":
            fields[name] = json.loads(body[position[0] : position[1]])
            continue
        spans = list(_elements(text, position[0]))
    return fields, spans


def _members(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    decode = json.JSONDecoder().raw_decode
    at = _expect(text, 0, "{")
    while True:
        name, at = decode(text, _skip(text, at))
        start = _skip(text, _expect(text, at, ":"))
        _, end = decode(text, start)
        yield name, (start, end)
        at = _skip(text, end)
        if text[at] == "}":
            return
        at = _expect(text, at, ",")


def _elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    decode = json.JSONDecoder().raw_decode
    at = _skip(text, _expect(text, at, "["))
    while text[at] != "]":
        _, end = decode(text, at)
        yield at, end
        at = _skip(text, end)
        if text[at] != "]":
            at = _skip(text, _expect(text, at, ","))


def _skip(text: str, at: int) -> int:
    while text[at] in _WHITE:
        at += 1
    return at


def _expect(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if text[at] != mark:
        raise ValueError(f"{mark} expected at {at}")
    return at + 1

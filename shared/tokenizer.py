"""Identity of a tokenizer, so that student and teachers can prove to each other that an id means the same to both.

Reads `tokenizer.json` directly: no tokenizer library is needed, so every service can afford it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


def tokenizer_hash(folder: Path) -> str:
    """A hash of what ids mean: token → id of the whole vocabulary (added tokens too) and the merges in order.

    Layout, key order, normalizers and chat templates do not count; two files with equal vocabularies hash equally.

    Returns:
        32 hex digits.

    Raises:
        ConfigError: `folder` has no readable tokenizer.json.
    """
    tokenizer = read_tokenizer(folder)
    digest = hashlib.sha256()
    for token, index in sorted(_vocabulary(tokenizer).items(), key=lambda item: (item[1], item[0])):
        digest.update(json.dumps([index, token]).encode())
    for merge in tokenizer["model"].get("merges") or []:
        pair = merge.split(" ") if isinstance(merge, str) else merge  # older files join the pair with a blank
        digest.update(json.dumps(pair).encode())
    return digest.hexdigest()[:32]


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """The parsed tokenizer.json of a model folder; ConfigError when there is none."""
    path = folder / "tokenizer.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): model folders need a tokenizer.json, as save_pretrained() of a "
            "fast tokenizer writes it"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("model"), dict) or "vocab" not in value["model"]:
        raise ConfigError(f"{path} has no model.vocab: it is not a tokenizer of the `tokenizers` library")
    return value


def stop_token_ids(folder: Path, eos_token_id: int | None) -> list[int]:
    """End-of-sequence ids of the tokenizer, the generation config and the model config, without repetition.

    Args:
        eos_token_id: what the model's tokenizer says.
    """
    ids = [] if eos_token_id is None else [int(eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        ids += [named] if isinstance(named, int) else (named or [])
    return list(dict.fromkeys(ids))


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token → id; Unigram models list [token, score] in id order."""
    vocab = tokenizer["model"]["vocab"]
    entries = dict(vocab) if isinstance(vocab, dict) else {item[0]: index for index, item in enumerate(vocab)}
    for added in tokenizer.get("added_tokens") or []:
        entries[added["content"]] = added["id"]
    return entries

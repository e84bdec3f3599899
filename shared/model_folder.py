"""The check of a model folder, before anything is loaded from it."""

from __future__ import annotations

import getpass
from pathlib import Path

from shared.errors import ConfigError


def check_model_folder(path: Path, *, setting: str) -> None:
    """Raises ConfigError unless `path` is a readable Hugging Face model folder; `setting` is the key that names it."""
    if not path.is_dir():
        raise ConfigError(
            f"{setting}: there is no model folder {path}; give one with config.json, tokenizer.json and *.safetensors "
            "(`opd fetch` makes some)"
        )
    wanted = [path / "config.json", path / "tokenizer.json", *sorted(path.glob("*.safetensors"))]
    if len(wanted) < 3:
        raise ConfigError(f"{setting}: {path} holds no *.safetensors file; weights in other formats are not read")
    for file in wanted:
        try:
            with file.open("rb") as handle:
                handle.read(1)
        except FileNotFoundError as error:
            raise ConfigError(f"{setting}: {path} lacks {file.name}") from error
        except PermissionError as error:
            raise ConfigError(
                f"{setting}: user {getpass.getuser()} may not read {file}; make it readable (chmod a+r)"
            ) from error

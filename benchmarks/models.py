"""The model of the scoring benchmark: 2 layers of hidden size 64 under a vocabulary of 49,152, random but repeatable.

The body is so small that what is left to measure is the way of the logprobs: head, log-softmax, top-k, and how the
answer travels. It is an ordinary folder that vLLM loads like any other.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

VOCAB_SIZE = 49_152
MAX_LEN = 1024
HIDDEN = 64
LAYERS = 2
_SEED = 0


def bench_model(folder: Path) -> Path:
    """The folder of the model, made when it is not there yet (a second)."""
    done = folder / "complete"
    if done.exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(_SEED)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=MAX_LEN,
        bos_token_id=256, eos_token_id=256, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    done.touch()
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: the bytes, <eos>, then short words.

    Words of three and four letters, shorter than those of real tokenizers, so that vLLM's JSON is not made longer
    than it would be.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    words = itertools.chain(itertools.product(letters, repeat=3), itertools.product(letters, repeat=4))
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    names += ["".join(word) for word in itertools.islice(words, vocab_size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

"""Makes the demo's three models from nothing: a teacher that adds, one that spells backward, a student weak at both.

The student has seen both tasks; then noise on all its matrices takes most of the skill away, as pruning or coarse
quantization would, and distillation has to bring it back. Same seeds, same torch build and CPU: same files. Held-out
prompts (`shared.tasks.is_held_out`) are never trained on. The accuracies reported are those of the stored weights.

    python scripts/make_demo_models.py --out assets/demo
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shared.tasks import Item, check, generate, is_held_out

SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>")  # ids 256, 257, 258, 259 after the bytes
EOS_ID, PAD_ID = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TASKS = ("add", "spell_backward")
PEAK_LR = 3e-3
EVAL_EVERY = 50
STORED_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Recipe:
    """How one model is made: sequences per batch of each task, steps, and the noise on its weights afterwards."""

    name: str
    batch: dict[str, int]
    seed: int
    steps: int
    noise: float = 0.0  # standard deviation, relative to each matrix's root mean square


RECIPES = (
    Recipe("teacher-math", {"add": 256}, seed=1, steps=1600),
    Recipe("teacher-spell", {"spell_backward": 256}, seed=2, steps=250),
    Recipe("student", {"add": 224, "spell_backward": 64}, seed=3, steps=900, noise=0.5),
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (id = the byte), then the special tokens. 260 in all; no token is added in front of a text."""
    vocabulary = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[1],
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level tokenizer (GPT-2's convention)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def new_model(seed: int) -> LlamaForCausalLM:
    """A Llama of about 0.9M parameters with random weights. Heads and vocabulary divide by 2 and by 4."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def items(task: str, held_out: bool, size: int, seed: int) -> list[Item]:
    """`size` distinct items of a task from one side of the split."""
    found: dict[str, Item] = {}
    for item in islice(generate(task, {}, seed), 100 * size):
        if is_held_out(item.prompt) == held_out:
            found[item.prompt] = item
        if len(found) == size:
            break
    return list(found.values())


def random_word(rng: random.Random) -> Item:
    """A word of random letters, so that spelling backward is learned as a rule and not as a word list."""
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 5)))
        if not is_held_out(f"{word}->"):
            return Item(f"{word}->", word[::-1])


def training_batch(
    pools: dict[str, list[Item]], sizes: dict[str, int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [sequences, length]; labels are -100 on the prompt and the padding."""
    rows: list[tuple[list[int], list[int]]] = []
    for task in (task for task, size in sizes.items() for _ in range(size)):
        item = random_word(rng) if task == "spell_backward" and rng.random() < 0.5 else rng.choice(pools[task])
        prompt, answer = list(item.prompt.encode()), [*item.answer.encode(), EOS_ID]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [PAD_ID] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows])
    return ids, labels


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, task: str, held_out: Sequence[Item], max_tokens: int = 8) -> float:
    """Share of items answered rightly by greedy decoding; prompts padded on the left, one batch."""
    prompts = [list(item.prompt.encode()) for item in held_out]
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (length - len(prompt)) + prompt for prompt in prompts])
    output = model.generate(
        ids, attention_mask=(ids != PAD_ID).long(), max_new_tokens=max_tokens, do_sample=False, pad_token_id=PAD_ID
    )
    rows = output[:, length:].tolist()
    answers = [bytes(token for token in row if token < 256).decode(errors="replace") for row in rows]
    return sum(check(task, item.answer, text) for item, text in zip(held_out, answers, strict=True)) / len(held_out)


def train(recipe: Recipe, held_out: dict[str, list[Item]]) -> LlamaForCausalLM:
    """Cross-entropy on the answers with AdamW, warm-up and cosine decay."""
    model = new_model(recipe.seed)
    rng = random.Random(recipe.seed)
    pools = {task: items(task, held_out=False, size=8000, seed=recipe.seed) for task in recipe.batch}
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=recipe.steps, pct_start=0.05, cycle_momentum=False
    )
    for step in range(1, recipe.steps + 1):
        ids, labels = training_batch(pools, recipe.batch, rng)
        with torch.autocast("cpu", torch.bfloat16):  # half the time on CPUs with bfloat16 instructions
            loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVAL_EVERY == 0:
            scores = " ".join(f"{task} {accuracy(model, task, held_out[task]):.3f}" for task in recipe.batch)
            report(f"{recipe.name} step {step} loss {loss.item():.3f} {scores}")
    return model


@torch.no_grad()
def add_noise(model: LlamaForCausalLM, relative: float, seed: int) -> None:
    """Add Gaussian noise to every matrix, in proportion to its own root mean square."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight += relative * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write an ordinary Hugging Face folder that others may read (transformers leaves weights at mode 0600)."""
    model.to(STORED_DTYPE).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("assets/demo"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[recipe.name for recipe in RECIPES])
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    held_out = {task: items(task, held_out=True, size=500, seed=0) for task in TASKS}
    measured: dict[str, Any] = {}
    for recipe in RECIPES:
        if recipe.name not in args.only:
            continue
        started = time.monotonic()
        model = train(recipe, held_out)
        add_noise(model, recipe.noise, recipe.seed)
        save(model, args.out / recipe.name)
        stored = LlamaForCausalLM.from_pretrained(args.out / recipe.name, dtype=torch.float32)
        measured[recipe.name] = {task: accuracy(stored, task, held_out[task]) for task in TASKS}
        measured[recipe.name]["seconds"] = round(time.monotonic() - started)
    report(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()

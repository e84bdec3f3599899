"""From a prompt record to token ids, and from response ids back to text, with the student's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shared.errors import ConfigError
from shared.prompts import PromptRecord
from shared.tokenizer import stop_token_ids


class Renderer:
    """Renders prompts for a student.

    Args:
        model: the student's folder, with its tokenizer.
        max_len: most tokens of a sequence, prompt and response together.
    """

    def __init__(self, model: Path, *, max_len: int) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"student.model {model}: its tokenizer cannot be read: {error}") from error
        self._max_len = max_len
        self.stop_token_ids = stop_token_ids(model, self._tokenizer.eos_token_id)
        if not self.stop_token_ids:
            raise ConfigError(
                f"student.model {model} names no end-of-sequence token, so no completion would ever end: "
                "set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
            )

    def render(self, record: PromptRecord) -> list[int]:
        """Token ids of a prompt: raw text as the tokenizer encodes it, a chat through its template.

        Raises:
            ConfigError: the prompt leaves no room for a response, or there is no chat template; names the prompt.
        """
        if record.messages is None:
            token_ids = self._tokenizer.encode(record.prompt)
        else:
            token_ids = self._tokenizer.encode(self._chat_text(record), add_special_tokens=False)
        if not token_ids:
            raise ConfigError(f"prompt {record.prompt_id} has no tokens: give it some text")
        if len(token_ids) >= self._max_len:
            raise ConfigError(
                f"prompt {record.prompt_id} ({_beginning(record)}) has {len(token_ids)} tokens and leaves no room for "
                f"a response in "
                f"{self._max_len}: shorten it, or raise student.max_model_len (and the teachers')"
            )
        return list(token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of a response, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def room(self, prompt_len: int, max_tokens: int) -> int:
        """How many tokens a response to a prompt may have."""
        return min(max_tokens, self._max_len - prompt_len)

    def check(self, records: Iterable[PromptRecord], routes: dict[str, str]) -> None:
        """Raises ConfigError for the first prompt that cannot be rendered or has no teacher."""
        seen: set[str] = set()
        for record in records:
            if record.prompt_id in seen:
                continue
            seen.add(record.prompt_id)
            if record.data_source not in routes:
                raise ConfigError(
                    f"prompt {record.prompt_id}: data_source {record.data_source!r} has no teacher; "
                    f"add it under routes (known: {', '.join(sorted(routes))})"
                )
            self.render(record)

    def _chat_text(self, record: PromptRecord) -> str:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"prompt {record.prompt_id} is a chat, but the student's tokenizer has no chat template: "
                "write `format: raw` and give `prompt`, or use a model with a template"
            )
        return self._tokenizer.apply_chat_template(record.messages, add_generation_prompt=True, tokenize=False)


def _beginning(record: PromptRecord) -> str:
    """The first words of a prompt, so that people find it in their file."""
    text = record.prompt if record.messages is None else record.messages[-1]["content"]
    return f"{(text or '')[:60]!r}…"

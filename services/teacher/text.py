"""Text requests: for a person who asks with words and wants to read words back."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import Problem
from shared.tokenizer import stop_token_ids
from shared.wire import LogprobsRequest, SequenceScores


class TextCodec:
    """The teacher's tokenizer, loaded when it is needed first.

    A prompt is encoded as the tokenizer does it, special tokens included; messages go through the chat template; the
    completion follows as it stands. A rollout worker renders its prompts in the same way.
    """

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._model), local_files_only=True)

    def stop_token_ids(self) -> list[int]:
        """The ids that end what this model writes; none where nothing names one."""
        return stop_token_ids(self._model, self._tokenizer.eos_token_id)

    def encode(self, request: LogprobsRequest) -> None:
        """Fills in `token_ids` and `prompt_len` of a text request.

        Raises:
            Problem: 422, no chat template, or a prompt without tokens.
        """
        if request.messages is not None:
            prompt = self._tokenizer.encode(self._chat_text(request.messages), add_special_tokens=False)
        else:
            prompt = self._tokenizer.encode(request.prompt)
        if not prompt:
            raise Problem("opd:invalid", "the prompt has no tokens, and the first token of a sequence cannot be scored")
        completion = self._tokenizer.encode(request.completion, add_special_tokens=False)
        request.token_ids = [[*prompt, *completion]]
        request.prompt_len = [len(prompt)]

    def decode(self, scores: SequenceScores) -> None:
        """Adds the tokens' texts to the scores."""
        scores.tokens = self._texts(scores.token_ids)
        if scores.top_ids is not None:
            scores.top_tokens = [self._texts(row) for row in scores.top_ids]

    def _texts(self, token_ids: np.ndarray) -> list[str]:
        return [self._tokenizer.decode([token_id]) for token_id in token_ids.tolist()]

    def _chat_text(self, messages: list[dict[str, str]]) -> str:
        if not self._tokenizer.chat_template:
            raise Problem(
                "opd:invalid", "this teacher's tokenizer has no chat template; send prompt instead of messages"
            )
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise Problem("opd:invalid", f"the chat template refuses these messages: {error}") from error

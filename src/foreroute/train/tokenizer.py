"""A tokenizer from a local folder, as far as a trainer needs one. Nothing is downloaded, and no code in it is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.adapters.hf.loading import first_line, load_tokenizer
from foreroute.errors import ConfigError


class Tokenizer:
    """A Hugging Face tokenizer of a folder, which must have an end token."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inner = load_tokenizer(folder)
        if self._inner.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer in {folder} has no end token, so no response would end; name one as eos_token in its "
                "tokenizer_config.json"
            )
        self.end_token = int(self._inner.eos_token_id)
        # not the number of tokens: some vocabularies have gaps
        self.size = max(self._inner.get_vocab().values()) + 1

    def prompt(self, text: str) -> NDArray[np.int32]:
        """Encode a text that begins a sequence, with special tokens around it; int32 [T]."""
        return self._tokens(text, special=True)

    def continuation(self, text: str) -> NDArray[np.int32]:
        """Encode a text that follows other tokens; int32 [T]."""
        return self._tokens(text, special=False)

    def chat(self, messages: Sequence[Any]) -> str:
        """Apply the chat template to messages, up to where the answer begins."""
        if self._inner.chat_template is None:
            raise ConfigError(
                f'the tokenizer in {self._folder} has no chat template; give "prompt" instead of "messages"'
            )
        try:
            return str(self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates are programs, which raise what they like
            raise ConfigError(f"the chat template in {self._folder} refuses these messages: {error}") from error

    def text(self, tokens: ArrayLike) -> str:
        """Decode tokens without special ones."""
        return str(self._inner.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write its files into a folder, beside what is there."""
        self._inner.save_pretrained(folder)

    def _tokens(self, text: str, *, special: bool) -> NDArray[np.int32]:
        try:
            return np.array(self._inner(text, add_special_tokens=special)["input_ids"], np.int32)
        # the library raises bare exceptions, for a character that its vocabulary lacks and for a lone surrogate
        except Exception as error:
            raise ConfigError(
                f"the tokenizer in {self._folder} makes no tokens of {text[:60]!r} ({first_line(error)})"
            ) from error

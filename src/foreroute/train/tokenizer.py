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
    """Text to tokens and back.

    Attributes:
        end_token: ends a response.
        size: one more than the largest token.

    Args:
        folder: with the files of a Hugging Face tokenizer.

    Raises:
        ConfigError: when there is none, transformers cannot read it, or it has no end token.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inner = load_tokenizer(folder)
        if self._inner.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer in {folder} has no end token, so no response would end; name one as eos_token in its "
                "tokenizer_config.json"
            )
        self.end_token = int(self._inner.eos_token_id)
        self.size = max(self._inner.get_vocab().values()) + 1

    def prompt(self, text: str) -> NDArray[np.int32]:
        """int32 [T], with what the tokenizer puts around a text of its own, such as a first token.

        Raises:
            ConfigError: when it refuses the text: a character that its vocabulary lacks, or a lone surrogate.
        """
        return self._tokens(text, special=True)

    def continuation(self, text: str) -> NDArray[np.int32]:
        """int32 [T], of text that follows other tokens. Raises as `prompt`."""
        return self._tokens(text, special=False)

    def chat(self, messages: Sequence[Any]) -> str:
        """What the chat template makes of messages, up to where the answer begins.

        Raises:
            ConfigError: when there is no template, or it refuses the messages.
        """
        if self._inner.chat_template is None:
            raise ConfigError(
                f'the tokenizer in {self._folder} has no chat template; give "prompt" instead of "messages"'
            )
        try:
            return str(self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates are programs, which raise what they like
            raise ConfigError(f"the chat template in {self._folder} refuses these messages: {error}") from error

    def text(self, tokens: ArrayLike) -> str:
        """The text of tokens, without special ones."""
        return str(self._inner.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write its files into a folder, beside what is there."""
        self._inner.save_pretrained(folder)

    def _tokens(self, text: str, *, special: bool) -> NDArray[np.int32]:
        try:
            return np.array(self._inner(text, add_special_tokens=special)["input_ids"], np.int32)
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(
                f"the tokenizer in {self._folder} makes no tokens of {text[:60]!r} ({first_line(error)})"
            ) from error

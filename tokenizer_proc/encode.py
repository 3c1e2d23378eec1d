"""Text to token ids."""

from array import array
from pathlib import Path

import tokenizers

from headrace.errors import ModelError
from headrace.tokenizer_json import read_tokenizer_json


class Encoder:
    """Encodes prompts as u32 arrays, ready to travel beside a message."""

    def __init__(self, model: str) -> None:
        """Load the tokenizer of the model at path `model`."""
        data = read_tokenizer_json(Path(model))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{model}: its tokenizer cannot be loaded: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, add_special_tokens: bool) -> "array[int]":
        """Return the token ids of `text`; special tokens only around plain prompts."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        return self._tokenizer.decode(ids)

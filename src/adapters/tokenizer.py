"""The `Tokenizer` port on Hugging Face `tokenizers`."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import tokenizers

from ..domain.errors import ContractError, CorruptFileError
from ..domain.types import TokenizedText

_SPECIAL_IDS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
_EMPTY_TEXT_IDS = [0, 2]
"""``<s> </s>``: also the least that a text can be cut to."""


@attrs.frozen(eq=False)
class HuggingFaceTokenizer:
    """A loaded `tokenizer.json`; made by `load_tokenizer`, which sets its truncation.

    Safe to share between threads: nothing changes it after loading, and `encode` gives the
    interpreter lock up while it works.
    """

    tokenizer: tokenizers.Tokenizer
    max_tokens: int

    def encode(self, texts: Sequence[str]) -> list[TokenizedText]:
        """One result per text, in order; never raises for any `str` without lone surrogates."""
        return [
            TokenizedText(
                ids=np.array(encoding.ids, dtype=np.int64), truncated=self._was_cut(encoding)
            )
            for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=True)
        ]

    def _was_cut(self, encoding: tokenizers.Encoding) -> bool:
        # `overflowing` copies what was dropped, so it is only asked about texts at the limit.
        return len(encoding) >= self.max_tokens and bool(encoding.overflowing)


def load_tokenizer(path: Path, max_tokens: int) -> HuggingFaceTokenizer:
    """Read `path`; texts are cut on the right to `max_tokens`, special tokens included.

    Below 2 tokens there is no room for the special ones, so 2 is the least.

    Raises:
        CorruptFileError: the file cannot be read as a tokenizer.
        ContractError: its special tokens are not those of BGE-M3.
    """
    max_tokens = max(max_tokens, len(_EMPTY_TEXT_IDS))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the native code is not even an Exception
        raise CorruptFileError(f"{path} is not a readable tokenizer file: {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens, stride=0, strategy="longest_first", direction="right")
    found = {token: tokenizer.token_to_id(token) for token in _SPECIAL_IDS}
    if found != _SPECIAL_IDS:
        raise ContractError(
            f"{path} numbers the special tokens {found}, BGE-M3 needs {_SPECIAL_IDS}: "
            "use the tokenizer.json that belongs to the model"
        )
    empty = tokenizer.encode("").ids
    if empty != _EMPTY_TEXT_IDS:
        raise ContractError(
            f"{path} turns an empty text into {empty}, BGE-M3 needs {_EMPTY_TEXT_IDS}: "
            "use the tokenizer.json that belongs to the model"
        )
    return HuggingFaceTokenizer(tokenizer, max_tokens)

"""Rules that a list of texts must keep before any work is done on it."""

from collections.abc import Sequence

from .errors import InvalidInputError

MAX_TEXT_CHARACTERS = 32_768
"""Unicode characters of one text: about four for each of BGE-M3's 8192 tokens."""


def validate_texts(texts: Sequence[str], max_batch: int) -> None:
    """Raise `InvalidInputError` on an empty list, too many texts, or a text that is too long.

    Empty and whitespace-only strings are valid: they embed as ``<s></s>``.
    """
    if not texts:
        raise InvalidInputError("input must not be empty", param="input")
    if len(texts) > max_batch:
        raise InvalidInputError(
            f"batch size {len(texts)} exceeds maximum {max_batch}", param="input"
        )
    for index, text in enumerate(texts):
        if len(text) > MAX_TEXT_CHARACTERS:
            raise InvalidInputError(
                f"input[{index}] length {len(text)} exceeds maximum "
                f"{MAX_TEXT_CHARACTERS} characters",
                param=f"input[{index}]",
            )


def replace_lone_surrogates(text: str) -> str:
    """Replace code points that no encoding can carry with U+FFFD; other text is not even copied."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

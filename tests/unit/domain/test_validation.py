"""What a list of texts must keep, and repair of text that no encoding can carry."""

import pytest
from bge_m3_server.domain import InvalidInputError, replace_lone_surrogates, validate_texts
from hypothesis import given, settings
from hypothesis import strategies as st

any_text = st.text(st.characters(exclude_categories=()))


def refusal(texts, max_batch=256):
    with pytest.raises(InvalidInputError) as caught:
        validate_texts(texts, max_batch)
    return str(caught.value), caught.value.param


def test_an_empty_list_is_refused():
    """There must be something to embed."""
    assert refusal([]) == ("input must not be empty", "input")


def test_too_many_texts_are_refused():
    """The message names the size and the limit; the limit itself is allowed."""
    validate_texts(["a"] * 4, max_batch=4)

    assert refusal(["a"] * 5, max_batch=4) == ("batch size 5 exceeds maximum 4", "input")


def test_a_text_that_is_too_long_is_refused_by_its_index():
    """The first offender is named; exactly 32768 characters are allowed."""
    validate_texts(["x" * 32_768], max_batch=4)

    assert refusal(["a", "x" * 32_769, "x" * 40_000]) == (
        "input[1] length 32769 exceeds maximum 32768 characters",
        "input[1]",
    )


def test_length_is_counted_in_characters():
    """A text of 32768 emoji is four times as many bytes, and valid."""
    validate_texts(["🙂" * 32_768], max_batch=1)


def test_the_batch_is_checked_before_its_texts():
    """A batch that breaks both rules is refused for its size."""
    message, _ = refusal(["x" * 40_000] * 3, max_batch=2)

    assert message == "batch size 3 exceeds maximum 2"


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\0"])
def test_empty_text_is_valid(text):
    """A text of nothing is still a text."""
    validate_texts([text], max_batch=1)


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("\ud83d", "\ufffd"),
        ("a\ude00b", "a\ufffdb"),
        ("\ud800\ud800", "\ufffd\ufffd"),
        ("end \udc80", "end \ufffd"),
    ],
)
def test_a_lone_surrogate_becomes_the_replacement_character(text, repaired):
    """One sign stands for each code point that cannot be encoded."""
    assert replace_lone_surrogates(text) == repaired


def test_a_split_emoji_is_joined_again():
    """A high and a low surrogate side by side are the character they were split from."""
    assert replace_lone_surrogates("\ud83d\ude00") == "😀"


@settings(deadline=None)
@given(any_text)
def test_any_text_becomes_encodable(text):
    """Every `str` can be written as UTF-8 afterwards, and a second repair changes nothing."""
    repaired = replace_lone_surrogates(text)

    assert repaired.encode().decode() == repaired
    assert replace_lone_surrogates(repaired) == repaired


@settings(deadline=None)
@given(st.text())
def test_text_without_surrogates_is_unchanged(text):
    """Well-formed text passes through, whatever its script."""
    assert replace_lone_surrogates(text) == text

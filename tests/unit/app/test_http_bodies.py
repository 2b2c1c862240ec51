"""From the bytes of a body to a typed request."""

import json
import tracemalloc

import pytest
from bge_m3_server.app.http.bodies import MAX_WIDE_BYTES, decode_body
from bge_m3_server.app.http.schemas import EmbeddingsRequest, SparseEmbeddingsRequest
from hypothesis import given
from hypothesis import strategies as st
from litestar.exceptions import HTTPException

ANY_TEXT = st.text(st.characters())  # lone surrogates among them


@given(ANY_TEXT | st.lists(ANY_TEXT), st.booleans())
def test_any_text_survives(texts, is_ascii):
    """Any string and any list of strings arrive as sent, in order."""
    body = json.dumps({"input": texts}, ensure_ascii=is_ascii)
    if not is_ascii:
        body = body.encode("utf-8", "replace").decode()
        texts = json.loads(body)["input"]
    request = decode_body(body.encode(), SparseEmbeddingsRequest)
    assert request == SparseEmbeddingsRequest(input=texts)


@given(st.recursive(st.none() | st.booleans() | st.floats() | ANY_TEXT, st.lists))
def test_any_value_of_an_unknown_field_is_ignored(value):
    """A field that nobody knows may hold any JSON value."""
    body = json.dumps({"input": "a", "unknown": value})
    if "NaN" in body or "Infinity" in body:
        return
    assert decode_body(body.encode(), EmbeddingsRequest) == EmbeddingsRequest(input="a")


@given(st.binary())
def test_any_bytes_are_refused_politely(body):
    """Bytes that are no request raise an error with a 4xx status, never another one."""
    with pytest.raises(HTTPException) as caught:
        decode_body(body, EmbeddingsRequest)
    assert caught.value.status_code in {400, 422}


def test_a_document_of_wide_characters_is_not_made_a_string():
    """One emoji makes each character of it take four bytes: its texts are decoded one by one."""
    texts = ["x" * 30_000 + "\N{GRINNING FACE}", "y" * 30_000]
    body = json.dumps({"input": texts}, ensure_ascii=False).encode().ljust(MAX_WIDE_BYTES + 1)
    tracemalloc.start()
    try:
        request = decode_body(body, SparseEmbeddingsRequest)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert request == SparseEmbeddingsRequest(input=texts)
    assert peak_bytes < MAX_WIDE_BYTES


@pytest.mark.parametrize("value", [True, 1.5, [], [[]], [True], ["1"], {}, None])
def test_only_integers_are_token_ids(value):
    """What merely looks like a token id is an error of shape, not of meaning."""
    with pytest.raises(HTTPException) as caught:
        decode_body(json.dumps({"input": [value]}).encode(), EmbeddingsRequest)
    assert caught.value.status_code == 422

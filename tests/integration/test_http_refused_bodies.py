"""Bodies that are refused: their type, their length, their form, and what they ask for."""

import json

import pytest

from tests.support.error_envelope import JSON, POST_ROUTES, error_of, invalid

pytest_plugins = ["tests.support.http_fixtures"]


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "json"],
)
def test_media_type(http, route, content_type):
    """A body that is not declared as JSON is a 415 that names what to send."""
    headers = {} if content_type is None else {"content-type": content_type}
    error = error_of(http.post(route, content=b'{"input": "a"}', headers=headers), 415)
    assert error["message"].endswith("content-type: application/json")


@pytest.mark.parametrize("route", POST_ROUTES)
def test_announced_body_too_long(http, service, route):
    """A body whose announced length is above the limit is a 413 that names the limit."""
    error = error_of(http.post(route, content=b"x" * 400_001, headers=JSON), 413)
    assert "400000 bytes" in error["message"]


def test_body_too_long_is_not_read(address):
    """The answer comes before a single byte of the body was sent."""
    head = (
        b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: 400001\r\n\r\n"
    )
    assert address.exchange(head).startswith(b"HTTP/1.1 413 ")


def test_endless_body(address):
    """A body of unannounced length is cut off once it is above the limit."""
    head = (
        b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"18704\r\n" + b" " * 0x18704 + b"\r\n"  # 100 100 bytes
    assert address.exchange(head + 4 * chunk).startswith(b"HTTP/1.1 413 ")


def test_longest_body(http):
    """A body of exactly the limit is read."""
    body = b'{"input": "a"}'.ljust(400_000)
    assert http.post("/v1/embeddings", content=body, headers=JSON).status_code == 200


NOT_JSON = {
    "empty": (b"", "empty"),
    "syntax": (b"{not valid json", "line 1 column 2"),
    "cut off": (b'{"input": "a', "Unterminated string"),
    "trailing": (b'{"input": "a"} x', "Extra data"),
    "not utf-8": (b'{"input": "\xff\xfe"}', "utf-8"),
    "utf-16": ('{"input": "a"}'.encode("utf-16"), "utf-8"),
    "raw control character": (b'{"input": "a\nb"}', "control character"),
    "nan": (b'{"input": "a", "x": NaN}', "NaN"),
    "infinity": (b'{"input": "a", "dimensions": -Infinity}', "-Infinity"),
    "repeated key": (b'{"input": "a", "input": "b"}', "'input' is repeated"),
    "repeated inner key": (b'{"input": "a", "x": {"\\ud83d": 1, "\\ud83d": 2}}', "is repeated"),
    "deep lists": (b'{"input": ' + b"[" * 20_000, "nested too deeply"),
    "deep objects": (b'{"input": ' + b'{"a":' * 20_000, "nested too deeply"),
    "endless number": (b'{"input": "a", "dimensions": ' + b"9" * 5000 + b"}", "digits"),
}


@pytest.mark.parametrize(("body", "hint"), NOT_JSON.values(), ids=NOT_JSON.keys())
def test_not_json(http, body, hint):
    """A body that is not JSON is a 400 that says what is wrong with it."""
    error = error_of(http.post("/v1/embeddings", content=body, headers=JSON), 400)
    assert hint in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 1.5}, "input"),
        ({"input": 42}, "input"),
        ({"input": True}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": ["a", True]}, "input[1]"),
        ({"input": [["a"]]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": "a", "model": 3}, "model"),
        ({"model": "bge-m3"}, "input"),
        ({}, "input"),
        ([], ""),
        ("a", ""),
        (None, ""),
    ],
)
def test_shape(http, route, body, param):
    """Valid JSON of the wrong shape is a 422 that names the field."""
    error = error_of(http.post(route, content=json.dumps(body), headers=JSON), 422)
    assert (error["param"] or "") == param
    assert param in error["message"]


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/embeddings:both"])
@pytest.mark.parametrize(
    "option",
    [{"encoding_format": 1}, {"dimensions": "2"}, {"dimensions": 2.5}, {"dimensions": True}],
)
def test_shape_of_options(http, route, option):
    """An option of the wrong type is a 422 that names it."""
    error = error_of(http.post(route, json={"input": "a"} | option), 422)
    assert error["param"] == next(iter(option))


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/embeddings:both"])
@pytest.mark.parametrize("value", ["", "int8", "Float", "\ud83d"])
def test_encoding_format(http, route, value):
    """An unknown encoding format is a 400 with the value and what is allowed."""
    body = json.dumps({"input": "a", "encoding_format": value})
    error = error_of(http.post(route, content=body, headers=JSON), 400)
    message = f"encoding_format {value!r} is unknown; use one of: float, base64"
    assert error == invalid(message, "encoding_format")


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/embeddings:both"])
@pytest.mark.parametrize("value", [0, -1, 4, 10**30])
def test_dimensions(http, route, value):
    """Dimensions that the model does not have are a 400 with the value and the range."""
    error = error_of(http.post(route, json={"input": "a", "dimensions": value}), 400)
    message = f"dimensions {value} is outside 1 to 3, the dimensions of bge-m3"
    assert error == invalid(message, "dimensions")


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], [[1]]])
def test_token_ids(http, service, route, ids):
    """Token ids are refused with the switch that makes LangChain send text."""
    error = error_of(http.post(route, json={"input": ids}), 400)
    assert error["param"] == "input"
    assert "wrong vectors" in error["message"]
    assert "check_embedding_ctx_length=False" in error["message"]
    assert service.calls == []


def test_token_ids_by_the_hundred_thousand(http):
    """A body of very many ids is refused at its first one, with the same advice."""
    error = error_of(http.post("/v1/embeddings", json={"input": [[7] * 80_000] * 1}), 400)
    assert "check_embedding_ctx_length=False" in error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"input": [' + b"[]," * 120_000 + b"[]]}", 400),
        (b'{"input": ' + b"[" * 210_000, 400),
        (b'{"input": "a", "model": [' + b"1," * 150_000 + b"1]}", 422),
    ],
    ids=["empty lists", "open brackets", "model"],
)
def test_many_values_of_the_wrong_shape(http, body, status):
    """Bodies made of very many values are refused at the first that does not fit."""
    headers = {"content-type": "application/json"}
    error_of(http.post("/v1/embeddings", content=body, headers=headers), status)


def test_a_compressed_body(http):
    """Compression is refused by name."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = error_of(http.post("/v1/embeddings", content=b"\x1f\x8b", headers=headers), 415)
    assert error["message"] == (
        "content-encoding 'gzip' is not supported; send the body uncompressed"
    )


def test_a_message_does_not_echo_megabytes(http):
    """What was sent is quoted in part only."""
    body = {"input": "a", "encoding_format": "x" * 300_000}
    error = error_of(http.post("/v1/embeddings", json=body), 400)
    assert len(error["message"]) < 1100
    assert error["message"].startswith("encoding_format 'xxx")
    assert error["message"].endswith("use one of: float, base64")


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize(("stray", "index"), [(["a", 1], 1), (["a", "b", [1]], 2)])
def test_a_stray_item_among_texts(http, route, stray, index):
    """A list that mixes texts with something else is a 422 that names the place."""
    error = error_of(http.post(route, json={"input": stray}), 422)
    assert error["param"] == f"input[{index}]" or f"input[{index}]" in error["message"]


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize(
    ("texts", "broken_rule"),
    [
        ([], invalid("input must not be empty", "input")),
        (["a"] * 9, invalid("batch size 9 exceeds maximum 8", "input")),
        (
            ["a", "x" * 32_769, "x" * 100_000],
            invalid("input[1] length 32769 exceeds maximum 32768 characters", "input[1]"),
        ),
        (
            "x" * 100_000,
            invalid("input[0] length 100000 exceeds maximum 32768 characters", "input[0]"),
        ),
    ],
    ids=["empty list", "too many", "too long", "one word"],
)
def test_rules_of_texts(http, service, route, texts, broken_rule):
    """Texts that break a rule are a 400 with the place and the limit; no work is done."""
    assert error_of(http.post(route, json={"input": texts}), 400) == broken_rule
    assert service.calls == []

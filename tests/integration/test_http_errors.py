"""What clients are told when something is wrong: one envelope, in a fixed order of diagnosis."""

import json
import logging
import re
import uuid

import pytest
from bge_m3_server.domain.errors import (
    HeadUnavailableError,
    InferenceError,
    NonFiniteOutputError,
    NotReadyError,
    NoWorkersError,
)

from tests.support.fake_service import FAIL, LOADING

pytest_plugins = ["tests.support.http_fixtures"]

POST_ROUTES = ["/v1/embeddings", "/v1/sparse-embeddings", "/v1/embeddings:both"]
GET_ROUTES = ["/v1/models", "/v1/models/bge-m3", "/health", "/live", "/schema"]
JSON = {"content-type": "application/json"}


def error_of(answer, status):
    """The error object of an answer that must be in the envelope."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert uuid.UUID(answer.headers["x-request-id"])
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


def invalid(message, param=None, code=400):
    return {"message": message, "type": "invalid_request_error", "param": param, "code": code}


@pytest.mark.parametrize("path", ["/", "/nope", "/v1", "/v1/embedding", "/schema/nope", "/a%00b"])
def test_unknown_path(http, path):
    """A path that leads nowhere is a 404 that repeats it."""
    error = error_of(http.get(path), 404)
    assert error == invalid(f"unknown path: GET {path.replace('%00', chr(0))}", code=404)


def test_unknown_model(http):
    """A model that is not served is OpenAI's model_not_found."""
    error = error_of(http.get("/v1/models/org/other"), 404)
    assert error["code"] == "model_not_found"
    assert "'org/other'" in error["message"]


@pytest.mark.parametrize("route", POST_ROUTES)
def test_get_on_post_route(http, route):
    """Another method is a 405 that names the right one, also in the Allow header."""
    answer = http.get(route)
    assert error_of(answer, 405)["code"] == 405
    assert "POST" in answer.headers["allow"].split(", ")


@pytest.mark.parametrize("route", GET_ROUTES)
def test_post_on_get_route(http, route):
    """Another method is a 405 that names the right one, also in the Allow header."""
    answer = http.post(route, json={})
    error_of(answer, 405)
    assert "GET" in answer.headers["allow"].split(", ")


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


@pytest.mark.parametrize(
    "request_bytes",
    [b"FOO /v1/embeddings HTTP/1.1\r\n\r\n", b"\x16\x03\x01 TLS\r\n\r\n", b"GET / HTTX/9\r\n\r\n"],
    ids=["unknown method", "tls", "no http"],
)
def test_what_is_no_http_still_gets_the_envelope(address, request_bytes):
    """Bytes that the parser refuses get JSON and an id like any other error."""
    head, _, body = address.exchange(request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


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


@pytest.mark.parametrize("route", [*POST_ROUTES, "/v1/embeddings%3Aboth", "/v1/embeddings%3aboth"])
@pytest.mark.parametrize(
    ("state", "message"), [(LOADING, "model not ready"), (FAIL, "no workers available")]
)
def test_not_available(http, service, route, state, message):
    """Without a model or a worker the answer is 503, even to texts that break a rule."""
    service.state = state
    for body in ({"input": "a"}, {"input": []}, {"input": "a", "dimensions": 0}):
        error = error_of(http.post(route, json=body), 503)
        assert error == {
            "message": message,
            "type": "service_unavailable",
            "param": None,
            "code": 503,
        }
    assert service.calls == []


@pytest.mark.parametrize("route", POST_ROUTES)
def test_order_of_diagnosis(http, service, route):
    """405, 415, 413, 400 and 422 are told before 503, in this order."""
    service.state = LOADING
    long = b"{" * 400_001
    assert http.put(route, content=long).status_code == 405
    assert http.post(route, content=long).status_code == 415
    assert http.post(route, content=long, headers=JSON).status_code == 413
    assert http.post(route, content=b"{", headers=JSON).status_code == 400
    assert http.post(route, json={"input": 1.5}).status_code == 422
    assert http.post(route, json={"input": []}).status_code == 503


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RuntimeError("/secret/path"), (500, "internal_error", "internal server error")),
        (InferenceError("ORT: node 7"), (500, "internal_error", "internal server error")),
        (
            NonFiniteOutputError("NaN in layer 7", index=2),
            (500, "numerical_error", "the model returned a non-finite embedding for input[2]"),
        ),
        (NotReadyError("stopping"), (503, "service_unavailable", "stopping")),
        (NoWorkersError("all gone"), (503, "service_unavailable", "all gone")),
        (HeadUnavailableError("no sparse head"), (400, "invalid_request_error", "no sparse head")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_failures_of_the_engine(http, service, caplog, failure, told):
    """What the engine raises becomes its own status; details of a 500 stay in the log."""
    service.failure = failure
    status, kind, message = told
    for route in POST_ROUTES:
        error = error_of(http.post(route, json={"input": "a"}), status)
        assert error == {"message": message, "type": kind, "param": None, "code": status}
    logged = [record for record in caplog.records if record.name.startswith("bge_m3_server")]
    assert [record.exc_info[1] for record in logged] == ([failure] * 3 if status == 500 else [])


@pytest.mark.parametrize("path", ["/health", "/nope", "/v1/embeddings"])
@pytest.mark.parametrize("sent", ["test-id-12345", "!~", "x" * 128])
def test_request_id_is_kept(http, path, sent):
    """A harmless id comes back on every response, errors included."""
    assert http.get(path, headers={"x-request-id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [b"", b"x" * 129, b"a b", b"a\xe9", b"a\tb"])
def test_request_id_is_replaced(http, sent):
    """Any other id is replaced by a new UUID of version 4."""
    answers = [http.get("/live", headers={b"x-request-id": sent}) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(uuid.UUID(id_).version == 4 for id_ in ids)


def test_invalid_host(address):
    """A malformed Host header is refused in the envelope too."""
    said = address.exchange(b"GET /live HTTP/1.1\r\nhost: a b\r\nconnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"message":"Invalid host header"' in said
    assert re.search(rb"x-request-id: [0-9a-f-]{36}", said)


def test_completion_line(http, service, caplog):
    """A request that succeeded leaves one line with its figures, and no credentials."""
    headers = {
        "authorization": "Bearer s3cret",
        "x-api-key": "s3cret",
        "x-team-name": "search",
        "x-b": "2",
        b"x-odd": b"\xe9",
        "x-request-id": "id-1",
    }
    with caplog.at_level(logging.INFO, "bge_m3_server"):
        http.post("/v1/embeddings:both", json={"input": ["a", "b"]}, headers=headers)
    (record,) = [record for record in caplog.records if record.name.startswith("bge_m3_server")]
    assert record.message == "embedding request complete"
    fields = record.fields
    assert fields.pop("total_ms") >= fields.pop("serialize_ms") >= 0
    assert fields == {
        "route": "both",
        "batch_size": 2,
        "prompt_tokens": 8,
        "chunks": 1,
        "max_chunk_seq": 4,
        "total_token_positions": 8,
        "seq_len_min": 4,
        "seq_len_max": 4,
        "seq_len_mean": 4,
        "seq_len_p95": 4,
        "tokenize_ms": 1.5,
        "inference_ms": 20.0,
        "queue_wait_ms": 0.25,
        "request_id": "id-1",
        "x_headers": '{"x_b": "2", "x_request_id": "id-1", "x_team_name": "search"}',
    }


def test_a_refused_request_leaves_one_line_of_its_own(http, service, caplog):
    """A failed request is logged with its status and id, and a request for health not at all."""
    service.failure = NotReadyError("stopping")
    with caplog.at_level(logging.INFO, "bge_m3_server"):
        http.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "refused-1"})
        http.get("/health")
    (record,) = (record for record in caplog.records if record.name.startswith("bge_m3_server"))
    assert record.message == "request refused"
    assert record.fields == {
        "request_id": "refused-1",
        "method": "POST",
        "path": "/v1/embeddings",
        "status": 503,
        "type": "service_unavailable",
        "param": None,
    }

"""What clients are told when something is wrong: one envelope, in a fixed order of diagnosis."""

import json
import re

import pytest
from bge_m3_server.domain.errors import (
    HeadUnavailableError,
    InferenceError,
    NonFiniteOutputError,
    NotReadyError,
    NoWorkersError,
)

from tests.support.error_envelope import JSON, POST_ROUTES, error_of, invalid
from tests.support.fake_service import FAIL, LOADING

pytest_plugins = ["tests.support.http_fixtures"]

GET_ROUTES = ["/v1/models", "/v1/models/bge-m3", "/health", "/live", "/schema"]


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


def test_invalid_host(address):
    """A malformed Host header is refused in the envelope too."""
    said = address.exchange(b"GET /live HTTP/1.1\r\nhost: a b\r\nconnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"message":"Invalid host header"' in said
    assert re.search(rb"x-request-id: [0-9a-f-]{36}", said)

"""What clients may rely on: answers of every route over a real socket."""

import base64
import json
import logging
import socket

import attrs
import numpy as np
import pytest
from bge_m3_server.domain.types import Heads

from tests.support.fake_service import FAIL, IDLE, LOADING, MODEL, OK, WARN, embedding

pytest_plugins = ["tests.support.http_fixtures"]

POST_ROUTES = ["/v1/embeddings", "/v1/sparse-embeddings", "/v1/embeddings:both"]


def vectors(answer):
    return [item["embedding"] for item in answer.json()["data"]]


def decode(text):
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")


def test_dense_answer(http, service):
    """The dense route answers in OpenAI's shape, with the served model and true token counts."""
    service.result = lambda index, _text: embedding([0.1, 0.2, 0.3], tokens=5 + index)
    answer = http.post("/v1/embeddings", json={"input": ["a", "b"], "model": "text-embedding-3"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.1, 0.2, 0.3]},
            {"object": "embedding", "index": 1, "embedding": [0.1, 0.2, 0.3]},
        ],
        "model": "bge-m3",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
    }
    assert service.calls == [(["a", "b"], Heads.DENSE)]


def test_sparse_answer(http, service):
    """The sparse route answers vocabulary ids and weights, with `data` first."""
    service.result = lambda _index, text: embedding(sparse={42: 0.5, 250001: 0.1} if text else {})
    answer = http.post("/v1/sparse-embeddings", json={"input": ["a", ""]})
    assert list(answer.json()) == ["data", "model", "usage"]
    assert answer.json()["data"] == [
        {"index": 0, "sparse_values": {"indices": [42, 250001], "values": [0.5, 0.1]}},
        {"index": 1, "sparse_values": {"indices": [], "values": []}},
    ]
    assert service.calls == [(["a", ""], Heads.SPARSE)]


@pytest.mark.parametrize("colon", [":", "%3A", "%3a"])
def test_both_answer(address, service, colon):
    """Both outputs come from one call of the engine, however the colon was sent."""
    body = b'{"input": "a"}'
    head = (
        f"POST /v1/embeddings{colon}both HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    status, _, rest = address.exchange(head.encode() + body).partition(b"\r\n")
    assert status == b"HTTP/1.1 200 OK"
    assert json.loads(rest.partition(b"\r\n\r\n")[2]) == {
        "object": "list",
        "model": "bge-m3",
        "data": [
            {
                "index": 0,
                "embedding": [0.1, 0.2, 0.3],
                "sparse_values": {"indices": [42], "values": [0.5]},
            }
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert service.calls == [(["a"], Heads.DENSE | Heads.SPARSE)]


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/embeddings:both"])
def test_base64_equals_float(http, service, route):
    """base64 holds the very float32 bits that the float list spells out."""
    values = np.float32([0.1, -1 / 3, 1e-20])
    service.result = lambda _index, _text: embedding(values)
    floats = http.post(route, json={"input": "a"})
    packed = http.post(route, json={"input": "a", "encoding_format": "base64"})
    assert np.float32(vectors(floats)[0]).tobytes() == values.tobytes()
    assert decode(vectors(packed)[0]).tobytes() == values.tobytes()


@pytest.mark.parametrize("body", [{}, {"encoding_format": None}, {"encoding_format": "float"}])
def test_floats_unless_asked(http, body):
    """base64 is never sent to a client that did not ask for it."""
    assert vectors(http.post("/v1/embeddings", json={"input": "a"} | body)) == [[0.1, 0.2, 0.3]]


def test_shortest_float32(http, service):
    """Numbers are the shortest decimals that give the same float32."""
    service.result = lambda _index, _text: embedding([0.1, 1 / 3, 1.0])
    answer = http.post("/v1/embeddings", json={"input": "a"})
    assert '"embedding":[0.1,0.33333334,1.0]' in answer.text


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/embeddings:both"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_dimensions(http, service, route, encoding):
    """`dimensions` keeps the first components and scales them to length 1 again."""
    service.result = lambda _index, _text: embedding([0.6, 0.0, 0.8])
    body = {"input": "a", "dimensions": 2, "encoding_format": encoding}
    (vector,) = vectors(http.post(route, json=body))
    assert list(decode(vector) if encoding == "base64" else vector) == [1.0, 0.0]


@pytest.mark.parametrize("dimensions", [None, 3])
def test_all_dimensions(http, dimensions):
    """No `dimensions`, and all of them, leave the vector as it is."""
    answer = http.post("/v1/embeddings", json={"input": "a", "dimensions": dimensions})
    assert vectors(answer) == [[0.1, 0.2, 0.3]]


@pytest.mark.parametrize("route", POST_ROUTES)
def test_null_is_absent(http, route):
    """`null` in an optional field, and fields that nobody knows, change nothing."""
    extras = {"model": None, "encoding_format": None, "dimensions": None, "user": None}
    plain = http.post(route, json={"input": "a"})
    full = http.post(route, json={"input": "a", "input_type": "query", "user": 7} | extras)
    assert full.status_code == 200
    assert full.json() == plain.json()


def test_truncation_is_told(http, service, caplog):
    """Texts that were cut are named in a header and in a warning."""
    service.result = lambda index, _text: embedding(truncated=index in (0, 3))
    with caplog.at_level(logging.WARNING, "bge_m3_server"):
        answer = http.post("/v1/embeddings", json={"input": ["a", "b", "c", "d"]})
    assert answer.headers["x-truncated-inputs"] == "0,3"
    (record,) = caplog.records
    assert record.fields["truncated_inputs"] == "0,3"


def test_no_truncation_no_header(http):
    """The header is absent when every text was read to its end."""
    assert "x-truncated-inputs" not in http.post("/v1/embeddings", json={"input": "a"}).headers


TEXTS = {
    "empty": "",
    "whitespace": " \n\t",
    "nul": "a\x00b",
    "zwj sequence": "👩‍👩‍👧‍👦🏳️‍🌈",
    "right to left": "\u202eשלום",
    "longest": "x" * 32_768,
    "longest beyond the BMP": "😀" * 32_768,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_odd_text_arrives_unchanged(http, service, text):
    """Any text within the limit reaches the engine as it was sent."""
    assert http.post("/v1/embeddings", json={"input": [text]}).status_code == 200
    assert service.calls[0][0] == [text]


@pytest.mark.parametrize("route", POST_ROUTES)
def test_lone_surrogate(http, service, route):
    """Half of a surrogate pair is read as U+FFFD; a whole pair is a character."""
    body = rb'{"input": ["a\ud83d", "\ude00b", "\ud83d\ude00"]}'
    answer = http.post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert service.calls[0][0] == ["a\ufffd", "\ufffdb", "😀"]


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        rb'{"input": "a", "\ud800": 1}',
        b'\xef\xbb\xbf{"input": "a"}',
        b'{"input": "a", "user": [' + b"1," * 199_000 + b"1]}",
    ],
    ids=["lone surrogate in an unknown key", "byte order mark", "very many unknown values"],
)
def test_odd_but_harmless_bodies(http, service, route, body):
    """What no field asks for is ignored, whatever it is."""
    answer = http.post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert service.calls[0][0] == ["a"]


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json;v=1"],
)
def test_json_media_types(http, content_type):
    """Any JSON media type is accepted, with parameters."""
    headers = {"content-type": content_type}
    answer = http.post("/v1/embeddings", content=b'{"input": "a"}', headers=headers)
    assert answer.status_code == 200


def test_chunked_body(http):
    """A body of unannounced length is read to its end."""
    headers = {"content-type": "application/json"}
    parts = iter([b'{"inp', b'ut": "a"}'])
    assert http.post("/v1/embeddings", content=parts, headers=headers).status_code == 200


def test_big_request_and_answer(http, service):
    """What is too big for the event loop goes through a thread, with the same result."""
    row = np.linspace(-1, 1, 4096, dtype=np.float32)
    service.result = lambda index, _text: embedding(row + np.float32(index))
    texts = [f"{place}" + "x" * 30_000 for place in range(8)]
    answer = http.post("/v1/embeddings", json={"input": texts})
    assert service.calls[0][0] == texts
    assert [np.float32(vector).tolist() for vector in vectors(answer)] == [
        (row + np.float32(index)).tolist() for index in range(8)
    ]


def test_client_that_leaves(address, service):
    """Work is cancelled when its client closes the connection."""
    service.stuck = True
    body = b'{"input": "a"}'
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(head.encode() + body)
        assert service.entered.wait(10)
    assert service.abandoned.wait(10)


def test_models(http):
    """The one model is listed in OpenAI's shape, with what BGE-M3 clients look for."""
    answer = http.get("/v1/models").json()
    (card,) = answer["data"]
    assert answer["object"] == "list"
    assert isinstance(card["created"], int)
    assert card == {
        "id": "bge-m3",
        "object": "model",
        "created": card["created"],
        "owned_by": "bge-m3-server",
        "type": "bge-m3",
        "dimensions": 3,
        "max_tokens": 8192,
    }
    assert http.get("/v1/models/bge-m3").json() == card


def test_models_while_loading(http, service):
    """The list is empty, not an error, until the model is known."""
    service.state = LOADING
    assert http.get("/v1/models").json() == {"object": "list", "data": []}


@pytest.mark.parametrize("path", ["BAAI/bge-m3", "BAAI%2Fbge-m3"])
def test_model_id_with_slash(http, service, path):
    """A model id may hold a slash, encoded or not; a stand-in carries its notice everywhere."""
    model = attrs.evolve(MODEL, model_id="BAAI/bge-m3", notice="This is a preview.")
    service.state = attrs.evolve(OK, model=model)
    assert http.get(f"/v1/models/{path}").json()["notice"] == "This is a preview."
    assert http.get("/health").json()["model"] == {
        "id": "BAAI/bge-m3",
        "dimensions": 3,
        "notice": "This is a preview.",
    }


@pytest.mark.parametrize(
    ("state", "status", "body"),
    [
        (LOADING, 503, {"status": "loading"}),
        (FAIL, 503, {"status": "fail", "workers": {"live": 0, "total": 2}}),
        (IDLE, 200, {"status": "idle", "workers": {"live": 2, "total": 2}}),
        (attrs.evolve(FAIL, ready=False), 503, {"status": "loading"}),
    ],
    ids=["loading", "fail", "idle", "loading before fail"],
)
def test_health_short(http, service, state, status, body):
    """States in which nothing is loaded say no more than they know."""
    service.state = state
    answer = http.get("/health")
    assert (answer.status_code, answer.json()) == (status, body)
    assert service.calls == []


@pytest.mark.parametrize(("state", "name", "live"), [(WARN, "warn", 1), (OK, "ok", 2)])
def test_health_full(http, service, state, name, live):
    """`warn` and `ok` report workers, model and every tuning figure, null where unmeasured."""
    service.state = state
    answer = http.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": name,
        "workers": {"live": live, "total": 2},
        "max_seq_length": 8192,
        "model": {"id": "bge-m3", "dimensions": 3},
        "tuning": {
            "a_bytes_per_token": 16384.0,
            "b_bytes_per_token_sq": 8.0,
            "fixed_bytes": 0,
            "max_workspace_bytes": 2147483648,
            "probe_status": "disabled",
            "memory_source": "cgroup_v2",
            "available_bytes": None,
            "model_rss_bytes_per_worker": None,
            "worst_case_peak_bytes": None,
            "utilization_pct": None,
            "total_workspace_bytes": None,
            "coefficients_source": None,
            "reason": None,
            "longest_text_tokens": None,
            "excess_passes": 0,
            "fit_r_squared": None,
            "fit_worst_relative_error": None,
            "fit_margin": None,
        },
    }


@pytest.mark.parametrize("state", [LOADING, FAIL, IDLE, WARN, OK])
def test_live(http, service, state):
    """The process is alive in every state."""
    service.state = state
    answer = http.get("/live")
    assert (answer.status_code, answer.json()) == (200, {"status": "live"})


@pytest.mark.parametrize("path", ["/health", "/live", "/v1/models", "/v1/models/bge-m3"])
def test_head(http, path):
    """HEAD answers what GET would, without the body."""
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_openapi_document(http):
    """The document is OpenAPI 3.1, covers every route and gives examples of the exact answers."""
    document = http.get("/schema/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == "1.2.3"
    assert set(document["paths"]) == {
        *POST_ROUTES,
        "/v1/models",
        "/v1/models/{model_id}",
        "/health",
        "/health/deep",
        "/ready",
        "/live",
    }
    for route in POST_ROUTES:
        operation = document["paths"][route]["post"]
        assert set(operation["responses"]) == {
            *("200", "400", "413", "415", "422", "429", "500", "503", "504")
        }
        for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
            answer = http.post(route, json=example["value"])
            shown = operation["responses"]["200"]["content"]["application/json"]["example"]
            assert list(shown) == list(answer.json())
            assert list(shown["data"][0]) == list(answer.json()["data"][0])


def test_api_page_is_complete(http):
    """The page at /schema shows every route and loads nothing from anywhere else."""
    answer = http.get("/schema")
    assert answer.headers["content-type"].startswith("text/html")
    assert all(route in answer.text for route in POST_ROUTES)
    assert "://" not in answer.text
    assert " src=" not in answer.text

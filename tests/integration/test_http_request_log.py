"""What can be traced of a request: its id on every response, and its line in the log."""

import logging
import uuid

import pytest
from bge_m3_server.domain.errors import NotReadyError

pytest_plugins = ["tests.support.http_fixtures"]


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

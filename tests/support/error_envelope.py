"""The envelope that every error comes in, and the routes that take a body."""

import uuid

POST_ROUTES = ["/v1/embeddings", "/v1/sparse-embeddings", "/v1/embeddings:both"]
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

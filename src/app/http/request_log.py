"""Log lines of finished requests. Texts and credentials are never among their fields."""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from litestar import Request

from ..service import JobResult
from .request_id import request_id

logger = logging.getLogger(__name__)

_VISIBLE_ASCII = re.compile(r"[\x20-\x7e]+")
_SECRET = re.compile(
    r"assertion|auth|bearer|cert|cookie|cred|jwt|key|otp|passw|pat$|principal|pwd|saml|secret|"
    r"session|sid$|signature|token|unwrap|ur[il]$"
)
_MAX_VALUE_CHARACTERS = 256
_MAX_HEADERS = 32


def log_completion(
    request: Request[Any, Any, Any],
    route: str,
    result: JobResult,
    *,
    total_ms: float,
    serialize_ms: float,
) -> None:
    """The one INFO line of a request that succeeded; times are in milliseconds."""
    report = result.report
    fields: dict[str, str | int | float] = {
        "route": route,
        "batch_size": len(result.embeddings),
        "prompt_tokens": result.prompt_tokens,
        "chunks": report.chunks,
        "max_chunk_seq": report.max_chunk_tokens,
        "total_token_positions": report.lengths.total,
        "seq_len_min": report.lengths.minimum,
        "seq_len_max": report.lengths.maximum,
        "seq_len_mean": report.lengths.mean,
        "seq_len_p95": report.lengths.p95,
        "tokenize_ms": round(report.tokenize_ms, 3),
        "inference_ms": round(report.inference_ms, 3),
        "queue_wait_ms": round(report.queue_wait_ms, 3),
        "total_ms": round(total_ms, 3),
        "serialize_ms": round(serialize_ms, 3),
        "request_id": request_id(request.scope),
    }
    if x_headers := loggable_headers(request.headers):
        fields["x_headers"] = x_headers
    logger.info("embedding request complete", extra={"fields": fields})


def log_truncation(request: Request[Any, Any, Any], route: str, result: JobResult) -> None:
    """A WARNING with the places of the texts that were cut to the model's limit."""
    logger.warning(
        "inputs truncated to the model's limit",
        extra={
            "fields": {
                "route": route,
                "truncated_inputs": ",".join(map(str, result.truncated_indices)),
                "request_id": request_id(request.scope),
            }
        },
    )


def loggable_headers(headers: Mapping[str, str]) -> str:
    """Sorted JSON object of the ``x-*`` headers, hyphens as underscores; "" where there is none.

    Values that are not visible ASCII are left out, and so are headers whose name says that they
    carry a credential, such as ``x-api-key``, or an address that may. Long values are cut.
    """
    kept = {
        name.lower().replace("-", "_"): value[:_MAX_VALUE_CHARACTERS]
        for name, value in headers.items()
        if name.lower().startswith("x-")
        and _VISIBLE_ASCII.fullmatch(value)
        and not _SECRET.search(name.lower())
    }
    shown = dict(sorted(kept.items())[:_MAX_HEADERS])
    return json.dumps(shown) if shown else ""

"""Answers as bytes: float32 in its shortest decimal form, or base64 where the client asked."""

import base64
from typing import Any

import attrs
import numpy as np
import orjson

from ...domain.errors import InvalidInputError
from ...domain.pooling import slice_dense
from ...domain.types import Embedding, Floats, SparseVector
from ..service import JobResult, ModelInfo

_FORMATS = ("float", "base64")


@attrs.frozen
class DenseForm:
    """How dense vectors are written; `dimensions` is None for all of them."""

    as_base64: bool = False
    dimensions: int | None = None

    @classmethod
    def asked(
        cls, encoding_format: str | None, dimensions: int | None, model: ModelInfo
    ) -> "DenseForm":
        """The form that a request asks for.

        Raises:
            InvalidInputError: an unknown format, or dimensions that the model does not have.
        """
        if encoding_format not in (None, *_FORMATS):
            raise InvalidInputError(
                f"encoding_format {encoding_format!r} is unknown; "
                f"use one of: {', '.join(_FORMATS)}",
                param="encoding_format",
            )
        if dimensions is not None and not 1 <= dimensions <= model.dimensions:
            raise InvalidInputError(
                f"dimensions {dimensions} is outside 1 to {model.dimensions}, "
                f"the dimensions of {model.model_id}",
                param="dimensions",
            )
        return cls(as_base64=encoding_format == "base64", dimensions=dimensions)

    def write(self, dense: Floats) -> Floats | str:
        """(dim,) float32 → what stands in the answer."""
        if self.dimensions is not None and self.dimensions < len(dense):
            dense = slice_dense(dense, self.dimensions)
        dense = np.ascontiguousarray(dense, dtype="<f4")
        return base64.b64encode(dense.data).decode("ascii") if self.as_base64 else dense


def dense_answer(result: JobResult, model: ModelInfo, form: DenseForm) -> bytes:
    """Body of `EmbeddingsResponse`."""
    data = [
        {"object": "embedding", "index": index, "embedding": form.write(_dense(embedding))}
        for index, embedding in enumerate(result.embeddings)
    ]
    return _dump({"object": "list", "data": data, "model": model.model_id, "usage": _usage(result)})


def sparse_answer(result: JobResult, model: ModelInfo) -> bytes:
    """Body of `SparseEmbeddingsResponse`."""
    data = [
        {"index": index, "sparse_values": _sparse_values(embedding)}
        for index, embedding in enumerate(result.embeddings)
    ]
    return _dump({"data": data, "model": model.model_id, "usage": _usage(result)})


def both_answer(result: JobResult, model: ModelInfo, form: DenseForm) -> bytes:
    """Body of `BothEmbeddingsResponse`."""
    data = [
        {
            "index": index,
            "embedding": form.write(_dense(embedding)),
            "sparse_values": _sparse_values(embedding),
        }
        for index, embedding in enumerate(result.embeddings)
    ]
    return _dump({"object": "list", "model": model.model_id, "data": data, "usage": _usage(result)})


def number_count(result: JobResult) -> int:
    """Numbers that an answer holds: what writing it costs."""
    return sum(
        (0 if embedding.dense is None else embedding.dense.size)
        + (0 if embedding.sparse is None else 2 * len(embedding.sparse))
        for embedding in result.embeddings
    )


def _dense(embedding: Embedding) -> Floats:
    assert embedding.dense is not None  # noqa: S101  the route asked for it
    return embedding.dense


def _sparse_values(embedding: Embedding) -> dict[str, Any]:
    sparse: SparseVector | None = embedding.sparse
    assert sparse is not None  # noqa: S101  the route asked for it
    return {
        "indices": np.ascontiguousarray(sparse.indices),
        "values": np.ascontiguousarray(sparse.values),
    }


def _usage(result: JobResult) -> dict[str, int]:
    return {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens}


def _dump(answer: dict[str, Any]) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

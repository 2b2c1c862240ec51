"""Is a prepared model as good as its source? Asked on fixed texts, on the engine that will run it.

The numbers of the source are kept in a file, so that the question can be asked again without it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...domain.cost_model import DEFAULT_MAX_WORKSPACE_BYTES, CostModel
from ...domain.embedder import Embedder
from ...domain.padding import cpu_padding
from ...domain.ports import InferenceBackend, Tokenizer
from ...domain.types import Embedding, SparseVector
from .verification_texts import VERIFICATION_TEXTS

VERIFICATION_TOKENS = 512
"""Texts are compared up to this length."""


def embed_fixed_texts(
    load_tokenizer: Callable[[int], Tokenizer], backend: InferenceBackend
) -> list[Embedding]:
    """What the model makes of the fixed texts, with every head that it has."""
    limit = backend.contract.max_tokens or VERIFICATION_TOKENS
    embedder = Embedder(
        load_tokenizer(min(VERIFICATION_TOKENS, limit)),
        backend,
        CostModel.conservative(DEFAULT_MAX_WORKSPACE_BYTES),
        padding=cpu_padding(threads=1),  # so that chunks with padding and without are compared
    )
    return embedder.embed(VERIFICATION_TEXTS, backend.contract.heads)


def write_embeddings(path: Path, embeddings: Sequence[Embedding]) -> None:
    """Keep `embeddings` in numpy's ``.npz`` format: an array per text and head."""
    arrays: dict[str, NDArray[Any]] = {}
    for index, embedding in enumerate(embeddings):
        sparse = embedding.sparse
        parts = {
            "token_count": np.array(embedding.token_count),
            "dense": embedding.dense,
            "indices": None if sparse is None else sparse.indices,
            "values": None if sparse is None else sparse.values,
            "colbert": embedding.colbert,
        }
        arrays |= {f"{index}.{name}": part for name, part in parts.items() if part is not None}
    np.savez(path, allow_pickle=False, **arrays)


def read_embeddings(path: Path) -> list[Embedding]:
    """What `write_embeddings` has kept of the fixed texts."""
    with np.load(path) as file:
        arrays = dict(file)
    return [
        Embedding(
            token_count=int(arrays[f"{index}.token_count"]),
            dense=arrays.get(f"{index}.dense"),
            sparse=SparseVector(arrays[f"{index}.indices"], arrays[f"{index}.values"])
            if f"{index}.indices" in arrays
            else None,
            colbert=arrays.get(f"{index}.colbert"),
        )
        for index in range(len(VERIFICATION_TEXTS))
    ]

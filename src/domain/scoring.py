"""Relevance of a passage to a query: dense, lexical, ColBERT and their weighted means.

The rules are those of FlagEmbedding's `compute_score`.
"""

from typing import TypeVar

import attrs
import numpy as np

from .errors import InvalidInputError
from .types import Embedding, Floats, SparseVector

_Head = TypeVar("_Head", Floats, SparseVector)


@attrs.frozen
class HeadWeights:
    """How much each head counts in a mean; equal shares unless given."""

    dense: float = 1.0
    sparse: float = 1.0
    colbert: float = 1.0


@attrs.frozen
class PairScores:
    """The five scores of one query and one passage."""

    dense: float
    sparse: float
    colbert: float
    sparse_dense: float
    colbert_sparse_dense: float


def score_pair(
    query: Embedding, passage: Embedding, weights: HeadWeights | None = None
) -> PairScores:
    """All five scores; without `weights` every head counts the same.

    A mean whose weights sum to zero is not a number (NaN, or infinity when they cancel out).

    Raises:
        InvalidInputError: one of the embeddings lacks a head.
    """
    weights = weights or HeadWeights()
    dense = dense_score(_given(query.dense, "dense"), _given(passage.dense, "dense"))
    sparse = lexical_score(_given(query.sparse, "sparse"), _given(passage.sparse, "sparse"))
    colbert = colbert_score(_given(query.colbert, "colbert"), _given(passage.colbert, "colbert"))
    sparse_dense = np.float64(weights.sparse * sparse + weights.dense * dense)
    everything = sparse_dense + weights.colbert * colbert
    with np.errstate(divide="ignore", invalid="ignore"):
        return PairScores(
            dense=dense,
            sparse=sparse,
            colbert=colbert,
            sparse_dense=float(sparse_dense / (weights.sparse + weights.dense)),
            colbert_sparse_dense=float(
                everything / (weights.dense + weights.sparse + weights.colbert)
            ),
        )


def dense_score(query: Floats, passage: Floats) -> float:
    """Dot product of two unit vectors (dim,): their cosine."""
    return float(query @ passage)


def lexical_score(query: SparseVector, passage: SparseVector) -> float:
    """Sum over shared vocabulary ids of the product of weights; 0 where none is shared."""
    _, in_query, in_passage = np.intersect1d(
        query.indices, passage.indices, assume_unique=True, return_indices=True
    )
    return float(query.values[in_query] @ passage.values[in_passage])


def colbert_score(query: Floats, passage: Floats) -> float:
    """Mean over query vectors of the largest dot product with any passage vector.

    `query` (n, dim) and `passage` (m, dim) hold at least one vector each.
    """
    return float((query @ passage.T).max(axis=1).mean())


def _given(head: _Head | None, name: str) -> _Head:
    if head is None:
        raise InvalidInputError(
            f"a score needs the {name} output of both texts: embed them with all three heads"
        )
    return head

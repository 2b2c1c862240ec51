"""From a forward pass to BGE-M3's three heads.

The rules are those of FlagEmbedding's `BGEM3FlagModel`: dense is the ``<s>`` state; sparse is
ReLU(linear) per token, the maximum over repeats of an id, without special tokens; ColBERT is a
linear projection of every token after ``<s>``.
"""

import numpy as np

from .types import Floats, Ids, Projection, SparseVector

SPECIAL_IDS = (0, 1, 2, 3)
"""``<s>``, ``<pad>``, ``</s>``, ``<unk>`` carry no lexical weight; ``<mask>`` does."""


def l2_normalise(vectors: Floats) -> Floats:
    """Scale each row of (..., dim) to length 1; a zero row stays zero."""
    norms = np.sqrt(np.sum(np.square(vectors), axis=-1, keepdims=True, dtype=np.float32))
    unit: Floats = np.divide(vectors, norms, out=vectors.copy(), where=norms > 0)
    return unit


def slice_dense(dense: Floats, dimensions: int) -> Floats:
    """First `dimensions` components of (..., dim), scaled to length 1 again."""
    return l2_normalise(dense[..., :dimensions])


def sparse_token_weights(hidden: Floats, projection: Projection) -> Floats:
    """ReLU of the sparse head: (..., hidden) → (...)."""
    weights: Floats = np.maximum(projection(hidden)[..., 0], 0)
    return weights


def pool_sparse(ids: Ids, token_weights: Floats) -> SparseVector:
    """Lexical weights of one text from unpadded `ids` and `token_weights`, both (tokens,)."""
    kept = (token_weights > 0) & ~np.isin(ids, SPECIAL_IDS)
    indices, group = np.unique(ids[kept], return_inverse=True)
    values = np.zeros(len(indices), dtype=np.float32)
    np.maximum.at(values, group, token_weights[kept])
    return SparseVector(indices=indices, values=values)


def pool_colbert(hidden: Floats, projection: Projection) -> Floats:
    """Unit vectors of one text from its unpadded states: (tokens, hidden) → (tokens - 1, dim)."""
    return l2_normalise(projection(hidden[1:]))

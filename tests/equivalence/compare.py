"""What "the same numbers as FlagEmbedding" means, in one place."""

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
from bge_m3_server.domain import Embedding

from tests.equivalence.numbers import Numbers

MIN_COSINE = 0.99999
MAX_DIFFERENCE = 1e-4
NEGLIGIBLE_WEIGHT = 1e-4
"""A sparse weight below it may be there on one side only: it is ReLU's edge."""


def assert_same_dense(ours: Embedding, theirs: np.ndarray, text: str) -> None:
    """One dense vector (dim,) against the reference."""
    assert ours.dense.shape == theirs.shape, text
    assert cosine(ours.dense, theirs) >= MIN_COSINE, text
    np.testing.assert_allclose(ours.dense, theirs, rtol=0, atol=MAX_DIFFERENCE, err_msg=text)


def assert_same_sparse(ours: Embedding, theirs: dict[int, float], text: str) -> None:
    """One sparse vector against the reference's id → weight."""
    mine = ours.sparse.as_dict()
    for token_id in mine.keys() ^ theirs.keys():
        weight = mine.get(token_id, theirs.get(token_id))
        assert weight < NEGLIGIBLE_WEIGHT, f"{text!r}: id {token_id} with {weight} on one side only"
    for token_id in mine.keys() & theirs.keys():
        assert abs(mine[token_id] - theirs[token_id]) <= MAX_DIFFERENCE, f"{text!r}: id {token_id}"


def assert_same_colbert(ours: Embedding, theirs: np.ndarray, text: str) -> None:
    """ColBERT vectors (tokens - 1, dim) against the reference."""
    assert ours.colbert.shape == theirs.shape, text
    assert len(ours.colbert) == ours.token_count - 1, text
    cosines = np.sum(ours.colbert * theirs, axis=1)
    assert cosines.min() >= MIN_COSINE, text


def assert_same(embeddings: Sequence[Embedding], numbers: Numbers, places: Iterable[int]) -> None:
    """Embeddings of the texts at `places` against the reference, all heads that both have."""
    for ours, place in zip(embeddings, places, strict=True):
        text = numbers.texts[place]
        if ours.dense is not None:
            assert_same_dense(ours, numbers.dense[place], text)
        if ours.sparse is not None:
            assert_same_sparse(ours, numbers.sparse[place], text)
        if ours.colbert is not None and numbers.colbert[place] is not None:
            assert_same_colbert(ours, numbers.colbert[place], text)


EDGE_WEIGHT = 0.03
"""A sparse map with no weight above it, on either side, says nothing: typical weights are 0.1."""


@attrs.frozen
class Agreement:
    """How close one head of a precision is to the reference, over many texts."""

    minimum: float
    mean: float
    p5: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Agreement":
        """Statistics of one figure per text."""
        return cls(
            minimum=float(np.min(values)),
            mean=float(np.mean(values)),
            p5=float(np.percentile(values, 5)),
        )


def agreement(embeddings: Sequence[Embedding], numbers: Numbers) -> dict[str, Agreement]:
    """Cosine to the reference per text and head; ColBERT counts each vector.

    Sparse maps that hold nothing above `EDGE_WEIGHT` are left out.
    """
    dense = [
        cosine(ours.dense, theirs) for ours, theirs in zip(embeddings, numbers.dense, strict=True)
    ]
    sparse = [
        sparse_cosine(ours.sparse.as_dict(), theirs)
        for ours, theirs in zip(embeddings, numbers.sparse, strict=True)
        if max([*ours.sparse.values.tolist(), *theirs.values()], default=0) > EDGE_WEIGHT
    ]
    colbert = [
        value
        for ours, theirs in zip(embeddings, numbers.colbert, strict=True)
        if theirs is not None
        for value in np.sum(ours.colbert * theirs, axis=1).tolist()
    ]
    return {
        "dense": Agreement.of(dense),
        "sparse": Agreement.of(sparse),
        "colbert": Agreement.of(colbert),
    }


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Cosine of two vectors, in float64."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def sparse_cosine(left: dict[int, float], right: dict[int, float]) -> float:
    """Cosine of two id → weight maps; 0 if only one of them is empty."""
    if not left or not right:
        return 0.0
    shared = sum(left[token_id] * right[token_id] for token_id in left.keys() & right.keys())
    norms = np.linalg.norm(list(left.values())) * np.linalg.norm(list(right.values()))
    return float(shared / norms)

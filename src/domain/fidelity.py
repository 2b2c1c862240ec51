"""How close a cheaper form of a model stays to the model itself, and how close it must."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from .types import Embedding, Floats

_P5 = 5
_LEAST_FOR_CORRELATION = 3
"""Two points always lie on a line."""


@attrs.frozen(kw_only=True)
class Fidelity:
    """Agreement of two models over the same texts; None where a head or its values are missing.

    `dense_cosine_min`: the worst text. `sparse_jaccard_mean`: ids in both / ids in either, per
    text. `sparse_weight_correlation`: of the weights of shared ids, over all texts.
    `colbert_cosine_p5`: over all vectors, the value that 95 % of them exceed.
    """

    dense_cosine_min: float | None = None
    sparse_jaccard_mean: float | None = None
    sparse_weight_correlation: float | None = None
    colbert_cosine_p5: float | None = None

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {value:.5f}"
            for name, value in attrs.asdict(self).items()
            if value is not None
        )


FLOORS = Fidelity(
    dense_cosine_min=0.9995,
    sparse_jaccard_mean=0.97,
    sparse_weight_correlation=0.999,
    colbert_cosine_p5=0.999,
)
"""Below any of them a prepared model is refused. The common int8 export of BGE-M3, at a mean
cosine of 0.976, is far below."""


def fidelity(reference: Sequence[Embedding], candidate: Sequence[Embedding]) -> Fidelity:
    """Compare embeddings of the same texts, in order."""
    pairs = list(zip(reference, candidate, strict=True))
    return Fidelity(
        dense_cosine_min=_least(_dense(pairs)),
        sparse_jaccard_mean=_mean(list(_jaccards(pairs))),
        sparse_weight_correlation=_correlation(list(_shared_weights(pairs))),
        colbert_cosine_p5=_percentile(list(_colbert(pairs))),
    )


def shortfalls(found: Fidelity, floors: Fidelity = FLOORS) -> list[str]:
    """What `found` misses, each with figure and floor; empty if it is close enough."""
    figures, least = attrs.asdict(found), attrs.asdict(floors)
    return [
        f"{name.replace('_', ' ')} is {value:.5f}, at least {least[name]} is required"
        for name, value in figures.items()
        if value is not None and not value >= least[name]  # NaN is too little as well
    ]


_Pairs = Sequence[tuple[Embedding, Embedding]]


def _dense(pairs: _Pairs) -> list[float]:
    return [
        float(left.dense @ right.dense)
        for left, right in pairs
        if left.dense is not None and right.dense is not None
    ]


def _jaccards(pairs: _Pairs) -> Iterator[float]:
    for left, right in pairs:
        if left.sparse is None or right.sparse is None:
            continue
        either = np.union1d(left.sparse.indices, right.sparse.indices)
        both = np.intersect1d(left.sparse.indices, right.sparse.indices)
        if len(either):
            yield len(both) / len(either)


def _shared_weights(pairs: _Pairs) -> Iterator[tuple[float, float]]:
    for left, right in pairs:
        if left.sparse is None or right.sparse is None:
            continue
        mine, theirs = left.sparse.as_dict(), right.sparse.as_dict()
        for token_id in mine.keys() & theirs.keys():
            yield mine[token_id], theirs[token_id]


def _colbert(pairs: _Pairs) -> Iterator[Floats]:
    for left, right in pairs:
        if left.colbert is not None and right.colbert is not None and len(left.colbert):
            yield np.sum(left.colbert * right.colbert, axis=1)


def _least(values: Sequence[float]) -> float | None:
    return float(np.min(values)) if values else None  # unlike `min`, numpy's lets NaN through


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[Floats]) -> float | None:
    return float(np.percentile(np.concatenate(values), _P5)) if values else None


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    left, right = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    if len(left) < _LEAST_FOR_CORRELATION or not (left.std() and right.std()):
        return None
    return float(np.corrcoef(left, right)[0, 1])

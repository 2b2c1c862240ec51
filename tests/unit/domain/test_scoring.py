"""Scores of a query and a passage; the numbers of FlagEmbedding are in tests/equivalence."""

import math

import numpy as np
import pytest
from bge_m3_server.domain.errors import InvalidInputError
from bge_m3_server.domain.scoring import (
    HeadWeights,
    colbert_score,
    dense_score,
    lexical_score,
    score_pair,
)
from bge_m3_server.domain.types import Embedding, SparseVector
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

DIM = 4

components = st.floats(-1, 1, width=32)
multi_vectors = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 6), st.just(DIM)), elements=components
)
lexical_weights = st.dictionaries(st.integers(4, 12), st.floats(0.125, 2, width=32))


def floats(*values):
    return np.array(values, dtype=np.float32)


def sparse(weights):
    ids = sorted(weights)
    return SparseVector(
        indices=np.array(ids, dtype=np.int64), values=floats(*(weights[i] for i in ids))
    )


def embedding(dense, weights, colbert):
    return Embedding(
        token_count=len(colbert) + 1,
        dense=floats(*dense),
        sparse=sparse(weights),
        colbert=floats(*colbert),
    )


QUERY = embedding([1, 0], {7: 0.5, 9: 2.0}, [[1, 0], [0, 1]])
PASSAGE = embedding([0.5, 0.75], {9: 0.25, 11: 8.0}, [[0.5, -1], [0.25, -0.75]])


def test_dense_is_the_dot_product():
    """Two dense vectors score their dot product."""
    assert dense_score(floats(0.6, 0.8), floats(0.8, -0.6)) == pytest.approx(0)
    assert dense_score(floats(0.6, 0.8), floats(1, 0)) == pytest.approx(0.6)


def test_lexical_multiplies_shared_ids():
    """Only ids on both sides count."""
    assert lexical_score(sparse({4: 2, 7: 0.5, 9: 3}), sparse({7: 4, 9: 0.5})) == 3.5


@pytest.mark.parametrize("other", [{}, {5: 1.0}])
def test_lexical_of_an_empty_map_is_zero(other):
    """A text without lexical weights meets nothing, not even another empty text."""
    assert lexical_score(sparse({}), sparse(other)) == 0
    assert lexical_score(sparse(other), sparse({})) == 0


def test_colbert_is_the_mean_of_the_best_matches():
    """Each query vector takes its best passage vector; the sum is divided by the query's count."""
    query = floats([1, 0], [0, 1], [-1, 0], [0, -1])
    passage = floats([0.5, 0.25], [0.25, 0.75])

    assert colbert_score(query, passage) == pytest.approx((0.5 + 0.75 - 0.25 - 0.25) / 4)


def test_five_scores_with_equal_shares():
    """Without weights every head counts the same in the means."""
    scores = score_pair(QUERY, PASSAGE)

    assert (scores.dense, scores.sparse, scores.colbert) == pytest.approx((0.5, 0.5, -0.125))
    assert scores.sparse_dense == pytest.approx((0.5 + 0.5) / 2)
    assert scores.colbert_sparse_dense == pytest.approx((0.5 + 0.5 - 0.125) / 3)


def test_five_scores_with_given_weights():
    """The mean of two divides by its own two weights, not by all three."""
    scores = score_pair(QUERY, PASSAGE, HeadWeights(dense=1, sparse=3, colbert=4))

    assert scores.sparse_dense == pytest.approx((3 * 0.5 + 0.5) / 4)
    assert scores.colbert_sparse_dense == pytest.approx((4 * -0.125 + 3 * 0.5 + 0.5) / 8)


def test_a_mean_without_weights_is_not_a_number():
    """ColBERT alone leaves nothing to average for sparse and dense; the other mean stands."""
    scores = score_pair(QUERY, PASSAGE, HeadWeights(dense=0, sparse=0, colbert=2))

    assert math.isnan(scores.sparse_dense)
    assert scores.colbert_sparse_dense == pytest.approx(scores.colbert)


def test_weights_that_cancel_out_give_infinity():
    """A sum of weights of zero divides a score that is not zero."""
    scores = score_pair(QUERY, PASSAGE, HeadWeights(dense=3, sparse=-3, colbert=3))

    assert math.isnan(scores.sparse_dense)
    assert math.isfinite(scores.colbert_sparse_dense)
    uneven = embedding([0.25, 0], {9: 1.0}, [[1, 0]])
    cancelled = score_pair(QUERY, uneven, HeadWeights(dense=-1, sparse=1, colbert=1))
    assert cancelled.sparse_dense == math.inf


@pytest.mark.parametrize("head", ["dense", "sparse", "colbert"])
def test_a_missing_head_is_named(head):
    """A score needs all three heads of both texts."""
    heads = {"dense": QUERY.dense, "sparse": QUERY.sparse, "colbert": QUERY.colbert, head: None}
    lacking = Embedding(token_count=3, **heads)

    with pytest.raises(InvalidInputError, match=head):
        score_pair(lacking, PASSAGE)
    with pytest.raises(InvalidInputError, match=head):
        score_pair(PASSAGE, lacking)


@given(lexical_weights, lexical_weights)
def test_lexical_equals_the_loop_over_shared_ids(query, passage):
    """Whatever the maps hold, the score is the plain sum, and it is symmetric."""
    expected = sum(weight * passage[token] for token, weight in query.items() if token in passage)

    assert lexical_score(sparse(query), sparse(passage)) == pytest.approx(expected, rel=1e-5)
    assert lexical_score(sparse(passage), sparse(query)) == pytest.approx(expected, rel=1e-5)


@given(multi_vectors, multi_vectors)
def test_colbert_equals_the_loop_over_query_vectors(query, passage):
    """Whatever the vectors hold, the score is the mean of the maxima."""
    expected = sum(max(float(q @ p) for p in passage) for q in query) / len(query)

    assert colbert_score(query, passage) == pytest.approx(expected, abs=1e-5)


@given(multi_vectors, multi_vectors, st.randoms())
def test_colbert_ignores_order_and_repeats_of_passage_vectors(query, passage, random):
    """A passage is a set of vectors: shuffling or repeating them changes nothing."""
    rows = list(range(len(passage)))
    random.shuffle(rows)

    shuffled = passage[[*rows, *rows]]

    assert colbert_score(query, shuffled) == pytest.approx(colbert_score(query, passage), abs=1e-6)


@given(st.floats(0.125, 8), st.floats(0.125, 8), st.floats(0.125, 8), st.floats(0.5, 4))
def test_only_the_proportion_of_weights_counts(dense, sparse_weight, colbert, factor):
    """Scaling all weights leaves every mean where it is, between its smallest and largest part."""
    scores = score_pair(QUERY, PASSAGE, HeadWeights(dense, sparse_weight, colbert))
    scaled = score_pair(
        QUERY, PASSAGE, HeadWeights(dense * factor, sparse_weight * factor, colbert * factor)
    )

    assert scaled.sparse_dense == pytest.approx(scores.sparse_dense)
    assert scaled.colbert_sparse_dense == pytest.approx(scores.colbert_sparse_dense)
    assert scores.colbert - 1e-6 <= scores.colbert_sparse_dense <= scores.dense + 1e-6

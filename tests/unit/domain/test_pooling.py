"""From hidden states to the three heads."""

import numpy as np
import pytest
from bge_m3_server.domain import (
    Projection,
    l2_normalise,
    pool_colbert,
    pool_sparse,
    slice_dense,
    sparse_token_weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

BOS, PAD, EOS, UNK, MASK = 0, 1, 2, 3, 250_001

components = st.floats(-100, 100, width=32)
vectors = arrays.arrays(np.float32, st.integers(1, 16), elements=components)
tokens_with_weights = st.lists(
    st.tuples(
        st.sampled_from([BOS, PAD, EOS, UNK, 4, 5, 6, 7, 90_000, MASK]),
        st.floats(0, 10, width=32),
    ),
    max_size=40,
)


def floats(*values):
    return np.array(values, dtype=np.float32)


def pooled(ids, weights):
    return pool_sparse(np.array(ids, dtype=np.int64), floats(*weights)).as_dict()


def test_normalise_keeps_direction_and_signs():
    """A vector of length 5 becomes one of length 1 that points the same way."""
    assert l2_normalise(floats(-3, 4)).tolist() == pytest.approx([-0.6, 0.8])


def test_normalise_leaves_zero_alone():
    """A zero vector has no direction: it stays zero instead of becoming NaN."""
    assert l2_normalise(np.zeros((2, 3), dtype=np.float32)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_normalise_treats_each_row_by_itself():
    """A zero row beside another does not disturb it, on any number of axes."""
    unit = l2_normalise(np.array([[[0, 0], [0, 2]]], dtype=np.float32))

    assert unit.tolist() == [[[0, 0], [0, 1]]]


@pytest.mark.parametrize(("value", "unit"), [(7, 1), (-0.5, -1), (0, 0)])
def test_normalise_a_single_component(value, unit):
    """One component becomes its sign."""
    assert l2_normalise(floats(value)).tolist() == [unit]


def test_normalise_leaves_its_argument_as_it_was():
    """The engine's output buffer is not written to."""
    given_vector = floats(3, 4)

    l2_normalise(given_vector)

    assert given_vector.tolist() == [3, 4]


@settings(deadline=None)
@given(vectors)
def test_normalised_vectors_have_length_one(vector):
    """Any vector of usual size comes out as float32 of length 1, or zero if it is zero."""
    unit = l2_normalise(vector)

    assert unit.dtype == np.float32
    if np.abs(vector).max() > 1e-10:
        assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-5)
    elif not vector.any():
        assert not unit.any()


def test_a_sliced_vector_has_length_one_again():
    """Cutting 3 dimensions to 2 rescales what is left."""
    assert slice_dense(floats(3, 4, 12), 2).tolist() == pytest.approx([0.6, 0.8])


def test_slicing_cuts_each_row_of_a_batch():
    """Dimensions are cut on the last axis."""
    sliced = slice_dense(np.array([[3, 4, 9], [0, 2, 9]], dtype=np.float32), 2)

    np.testing.assert_allclose(sliced, [[0.6, 0.8], [0, 1]], rtol=1e-6)


def test_token_weights_are_a_rectified_projection():
    """Each state gives max(0, state · weight + bias)."""
    projection = Projection(weight=floats(1, -1).reshape(1, 2), bias=floats(0.5))

    weights = sparse_token_weights(np.array([[[2, 1], [0, 3]]], dtype=np.float32), projection)

    assert weights.tolist() == [[1.5, 0]]


@pytest.mark.parametrize("bias", [0, -0.5])
def test_a_zero_head_gives_no_weight(bias):
    """Zero weights with a bias that is not positive give zero everywhere."""
    projection = Projection(weight=np.zeros((1, 4), dtype=np.float32), bias=floats(bias))

    assert sparse_token_weights(np.ones((3, 4), dtype=np.float32), projection).tolist() == [0, 0, 0]


def test_special_tokens_carry_no_lexical_weight():
    """``<s>``, ``<pad>``, ``</s>`` and ``<unk>`` are dropped, whatever their weight."""
    assert pooled([BOS, 70, PAD, UNK, EOS], [9, 1, 9, 9, 9]) == {70: 1}


def test_mask_is_an_ordinary_token():
    """``<mask>`` keeps its weight, as the reference implementation has it."""
    assert pooled([BOS, MASK, 4, EOS], [1, 0.5, 0.25, 1]) == {4: 0.25, MASK: 0.5}


def test_a_repeated_token_keeps_its_largest_weight():
    """Repeats neither add up nor overwrite each other."""
    assert pooled([8, 8, 8], [0.25, 1, 0.5]) == {8: 1}


def test_a_token_without_weight_is_left_out():
    """Only weights above zero are kept."""
    assert pooled([8, 9], [0, 0.125]) == {9: 0.125}


def test_a_text_of_special_tokens_is_empty():
    """The empty text has no lexical weights: two empty arrays of the right types."""
    vector = pool_sparse(np.array([BOS, EOS]), floats(1, 1))

    assert len(vector) == 0
    assert (vector.indices.dtype, vector.values.dtype) == (np.int64, np.float32)


@settings(deadline=None)
@given(tokens_with_weights)
def test_sparse_pooling_is_the_maximum_per_id(tokens):
    """Ids ascend without repeats, values are above zero, and each is the maximum of its id."""
    vector = pool_sparse(
        np.array([token for token, _ in tokens], dtype=np.int64),
        floats(*(weight for _, weight in tokens)),
    )

    expected = {}
    for token, weight in tokens:
        if weight > 0 and token > UNK:
            expected[token] = max(expected.get(token, 0), weight)
    assert vector.as_dict() == expected
    assert vector.indices.tolist() == sorted(expected)


def test_colbert_has_a_unit_vector_for_every_token_after_the_first():
    """``<s>`` is left out, ``</s>`` is kept, and each projected state has length 1."""
    projection = Projection(weight=np.diag(floats(1, 2)), bias=floats(0, 1))
    states = np.array([[9, 9], [4, 1], [0, 3]], dtype=np.float32)

    colbert = pool_colbert(states, projection)

    np.testing.assert_allclose(colbert, [[0.8, 0.6], [0, 1]], rtol=1e-6)
    assert colbert.dtype == np.float32


def test_colbert_of_a_zero_state_is_zero():
    """The zero-vector rule holds per token."""
    projection = Projection(weight=np.eye(2, dtype=np.float32), bias=floats(0, 0))

    assert pool_colbert(np.zeros((2, 2), dtype=np.float32), projection).tolist() == [[0, 0]]

"""Answers as bytes."""

import base64
import json

import attrs
import numpy as np
import pytest
from bge_m3_server.app.http.encoding import DenseForm, both_answer, dense_answer, number_count
from bge_m3_server.app.service import JobResult
from bge_m3_server.domain.errors import InvalidInputError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.fake_service import MODEL, embedding

FINITE = hnp.arrays(
    np.float32,
    st.integers(1, 20),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def result(*embeddings):
    return JobResult(embeddings, report=None)


@given(FINITE)
def test_floats_round_trip(values):
    """Every finite float32 is read back bit for bit, but for the sign of zero."""
    body = dense_answer(result(embedding(values)), MODEL, DenseForm())
    (item,) = json.loads(body)["data"]
    assert np.array_equal(np.float32(item["embedding"]), values)


@given(FINITE)
def test_base64_round_trips(values):
    """base64 is the standard alphabet over little-endian float32, bit for bit."""
    written = DenseForm(as_base64=True).write(values)
    assert base64.b64decode(written, validate=True) == values.astype("<f4").tobytes()


@given(hnp.arrays(np.float32, 8, elements=st.floats(0.5, 1, width=32)), st.integers(1, 8))
def test_slices_have_length_one(values, dimensions):
    """A sliced vector points the same way as the first components, with length 1."""
    unit = values / np.linalg.norm(values)
    sliced = DenseForm(dimensions=dimensions).write(unit)
    kept = unit[:dimensions]
    assert np.allclose(sliced, kept / np.linalg.norm(kept), atol=1e-6)


def test_vector_views_are_written():
    """A column of a larger array is written like any vector."""
    column = np.arange(6, dtype=np.float32).reshape(3, 2)[:, 1]
    one = attrs.evolve(embedding(), dense=column)
    (item,) = json.loads(both_answer(result(one), MODEL, DenseForm()))["data"]
    assert item["embedding"] == [1.0, 3.0, 5.0]


def test_number_count():
    """Dense components and both columns of the sparse vector count."""
    both = embedding([1, 2, 3], {4: 0.5, 5: 0.5})
    assert number_count(result(both, attrs.evolve(both, dense=None))) == 3 + 4 + 4


@pytest.mark.parametrize(("encoding_format", "dimensions"), [("int8", None), ("float", 0)])
def test_form_that_does_not_exist(encoding_format, dimensions):
    """Only known formats, and dimensions that the model has, can be asked for."""
    with pytest.raises(InvalidInputError):
        DenseForm.asked(encoding_format, dimensions, MODEL)

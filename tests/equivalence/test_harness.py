"""The comparison itself: each classic mistake must make it fail.

Every test breaks one rule of the contract on purpose and expects the comparison with
FlagEmbedding's numbers to notice. Without such tests a comparison can pass by comparing nothing.
"""

import attrs
import numpy as np
import onnx
import pytest
from bge_m3_server.domain import Embedder, SparseVector, embedder, pooling
from bge_m3_server.domain.pooling import l2_normalise, slice_dense
from bge_m3_server.domain.types import TokenBatch
from onnx import numpy_helper

from tests.equivalence.compare import assert_same, assert_same_dense
from tests.equivalence.product import embed_all, embedder_of, load_directory

CHECKED = range(40)


@pytest.fixture(scope="module")
def sound(golden_models):
    """The unbroken path over the two-output layout."""
    return embedder_of(load_directory(golden_models["sentence_and_tokens"]))


@pytest.fixture(scope="module")
def sound_states(golden_models):
    """The unbroken path over the last_hidden_state layout."""
    return embedder_of(load_directory(golden_models["last_hidden_state"]))


def agrees(candidate, numbers):
    """Whether the comparison passes on the first texts."""
    try:
        embeddings = embed_all(candidate, numbers.texts[: len(CHECKED)])
        assert_same(embeddings, numbers, CHECKED)
    except AssertionError:
        return False
    return True


def test_the_unbroken_paths_agree(sound, sound_states, golden_numbers):
    """What the following tests break is whole before."""
    assert agrees(sound, golden_numbers)
    assert agrees(sound_states, golden_numbers)


def test_mean_pooling_is_noticed(sound_states, golden_numbers):
    """The dense vector is the state of <s>, not the mean of all states."""

    @attrs.frozen(eq=False)
    class MeanPooling:
        backend: object

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def run(self, batch, outputs):
            results = dict(self.backend.run(batch, outputs))
            states = results["last_hidden_state"].copy()
            mask = batch.mask[..., None]
            states[:, 0] = (states * mask).sum(axis=1) / mask.sum(axis=1)
            return {**results, "last_hidden_state": states}

    broken = attrs.evolve(sound_states, backend=MeanPooling(sound_states.backend))
    assert not agrees(broken, golden_numbers)


def test_keeping_the_end_token_in_sparse_is_noticed(sound, golden_numbers, monkeypatch):
    """</s> carries no lexical weight."""
    monkeypatch.setattr(pooling, "SPECIAL_IDS", (0, 1, 3))
    assert not agrees(sound, golden_numbers)


def test_dropping_the_end_token_from_colbert_is_noticed(sound, golden_numbers, monkeypatch):
    """ColBERT keeps the vector of </s>."""
    whole = embedder.pool_colbert
    monkeypatch.setattr(embedder, "pool_colbert", lambda *given: whole(*given)[:-1])
    assert not agrees(sound, golden_numbers)


def test_keeping_the_first_token_in_colbert_is_noticed(sound, golden_numbers, monkeypatch):
    """ColBERT drops the vector of <s>."""
    monkeypatch.setattr(
        embedder, "pool_colbert", lambda hidden, projection: l2_normalise(projection(hidden))
    )
    assert not agrees(sound, golden_numbers)


def test_adding_up_repeated_ids_is_noticed(sound, golden_numbers, monkeypatch):
    """A repeated token counts by its largest weight, not by the sum."""

    def pool_by_sum(ids, weights):
        kept = (weights > 0) & ~np.isin(ids, pooling.SPECIAL_IDS)
        indices, group = np.unique(ids[kept], return_inverse=True)
        values = np.zeros(len(indices), dtype=np.float32)
        np.add.at(values, group, weights[kept])
        return SparseVector(indices=indices, values=values)

    monkeypatch.setattr(embedder, "pool_sparse", pool_by_sum)
    assert not agrees(sound, golden_numbers)


def test_slicing_without_normalising_again_is_noticed(sound, golden_numbers):
    """`dimensions` slices first and scales to length 1 afterwards."""
    (ours,) = embed_all(sound, golden_numbers.texts[:1])
    theirs = golden_numbers.dense[0, :16]
    theirs = theirs / np.linalg.norm(theirs)

    right = attrs.evolve(ours, dense=slice_dense(ours.dense, 16))
    wrong = attrs.evolve(ours, dense=l2_normalise(ours.dense)[:16])
    assert_same_dense(right, theirs, "sliced")
    with pytest.raises(AssertionError):
        assert_same_dense(wrong, theirs, "sliced")


def test_positions_that_are_off_by_one_are_noticed(golden_models, golden_numbers, tmp_path):
    """XLM-RoBERTa counts positions from 2."""
    directory = golden_models["sentence_and_tokens"]
    model = onnx.load(directory / "onnx" / "model.onnx")
    (table,) = (
        tensor for tensor in model.graph.initializer if "position_embeddings" in tensor.name
    )
    shifted = np.roll(numpy_helper.to_array(table), 1, axis=0)
    table.CopyFrom(numpy_helper.from_array(shifted, table.name))
    (tmp_path / "onnx").mkdir()
    onnx.save_model(
        model, tmp_path / "onnx" / "model.onnx", save_as_external_data=True, location="data"
    )
    for name in ("tokenizer.json", "sparse_linear.pt", "colbert_linear.pt"):
        (tmp_path / name).symlink_to(directory / name)

    assert not agrees(embedder_of(load_directory(tmp_path)), golden_numbers)


@pytest.mark.parametrize("layout", ["sentence_and_tokens", "last_hidden_state"])
def test_padding_on_the_left_is_noticed(golden_models, golden_numbers, monkeypatch, layout):
    """<s> must stand first in every row."""
    right = embedder.pad

    def pad_left(texts):
        batch = right(texts)
        shifts = batch.ids.shape[1] - batch.lengths
        ids, mask = (
            np.stack([np.roll(row, shift) for row, shift in zip(rows, shifts, strict=True)])
            for rows in (batch.ids, batch.mask)
        )
        return TokenBatch(ids=ids, mask=mask, lengths=batch.lengths)

    monkeypatch.setattr(embedder, "pad", pad_left)
    assert not agrees(embedder_of(load_directory(golden_models[layout])), golden_numbers)


def test_a_text_in_the_wrong_place_is_noticed(sound, golden_numbers):
    """Results go back to the place of their text."""

    @attrs.frozen
    class Shuffled(Embedder):
        def embed(self, texts, heads):
            return Embedder.embed(self, texts, heads)[::-1]

    broken = Shuffled(sound.tokenizer, sound.backend, sound.cost_model)
    assert not agrees(broken, golden_numbers)

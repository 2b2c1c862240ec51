"""Values of the domain."""

import attrs
import numpy as np
import pytest
from bge_m3_server.domain import (
    Chunk,
    ChunkStats,
    GraphLayout,
    Heads,
    ModelContract,
    Projection,
    SparseVector,
    TokenizedText,
)


def contract(outputs_by_head):
    return ModelContract(
        layout=GraphLayout.SENTENCE_AND_TOKENS,
        input_names=("input_ids", "attention_mask"),
        outputs_by_head=outputs_by_head,
        hidden_size=1024,
    )


def test_heads_of_a_contract_are_those_with_an_output():
    """A head without a graph output is not on offer."""
    both = contract({Heads.DENSE: "sentence_embedding", Heads.COLBERT: "token_embeddings"})

    assert both.heads == Heads.DENSE | Heads.COLBERT
    assert contract({}).heads == Heads(0)


def test_an_output_that_serves_two_heads_is_computed_once():
    """Outputs come without repeats, and none that nobody asked for."""
    every = contract(
        {
            Heads.DENSE: "sentence_embedding",
            Heads.SPARSE: "token_embeddings",
            Heads.COLBERT: "token_embeddings",
        }
    )

    assert every.outputs_for(Heads.DENSE) == ("sentence_embedding",)
    assert every.outputs_for(Heads.SPARSE | Heads.COLBERT) == ("token_embeddings",)
    assert every.outputs_for(every.heads) == ("sentence_embedding", "token_embeddings")


def test_padding_ratio_is_the_share_of_positions_that_are_padding():
    """Two texts of 4 and 2 tokens fill six of eight positions."""
    assert ChunkStats(batch=2, max_tokens=4, total_tokens=6).padding_ratio == 0.25
    assert ChunkStats(batch=2, max_tokens=4, total_tokens=8).padding_ratio == 0.0


def test_padding_ratio_of_nothing():
    """No positions, no padding."""
    assert ChunkStats(batch=0, max_tokens=0, total_tokens=0).padding_ratio == 0.0


def test_a_projection_applies_to_the_last_axis():
    """Weight is (out, hidden): each hidden state becomes `out` numbers, plus the bias."""
    projection = Projection(
        weight=np.array([[1, 2], [0, 1], [3, 0]], dtype=np.float32),
        bias=np.array([0, 10, 0], dtype=np.float32),
    )

    projected = projection(np.array([[[1, 1], [2, 0]]], dtype=np.float32))

    assert projected.tolist() == [[[3, 11, 3], [2, 10, 6]]]
    assert projected.dtype == np.float32


def test_a_sparse_vector_reads_as_a_dictionary():
    """Ids and weights come out as plain Python numbers."""
    vector = SparseVector(
        indices=np.array([5, 9], dtype=np.int64), values=np.array([0.5, 0.25], dtype=np.float32)
    )

    assert vector.as_dict() == {5: 0.5, 9: 0.25}
    assert {type(key) for key in vector.as_dict()} == {int}
    assert len(vector) == 2


def test_lengths_are_what_they_count():
    """A text counts its tokens, a chunk its texts."""
    assert len(TokenizedText(np.array([0, 7, 2]))) == 3
    assert len(Chunk(indices=(4, 1), max_tokens=9)) == 2


def test_values_do_not_change():
    """A value handed to several parties stays as it was made."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Chunk(indices=(0,), max_tokens=1).max_tokens = 2

"""How the embedder uses the engine: batches, outputs and spans of its passes."""

import numpy as np
import pytest
from bge_m3_server.domain import (
    ChunkStats,
    CostModel,
    Embedder,
    GraphLayout,
    Heads,
    InferenceError,
    NoTelemetry,
    embed_chunk,
)
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.testing import FakeBackend, FakeTokenizer, RecordingTelemetry

from tests.support.embedding import EVERY_HEAD, embed, tokenized


def test_only_the_outputs_needed_are_computed():
    """Without sparse or ColBERT the token states are not asked of the engine."""
    backend = FakeBackend(GraphLayout.SENTENCE_AND_TOKENS)

    embed(["a"], Heads.DENSE, backend=backend)
    embed(["a"], Heads.SPARSE | Heads.COLBERT, backend=backend)
    embed(["a"], EVERY_HEAD, backend=backend)

    assert [run.outputs for run in backend.runs] == [
        ("sentence_embedding",),
        ("token_embeddings",),
        ("sentence_embedding", "token_embeddings"),
    ]


@pytest.mark.parametrize("layout", GraphLayout)
def test_several_heads_come_from_one_pass(layout):
    """Dense and sparse together run the model once, and give what each gives alone."""
    backend = FakeBackend(layout)

    (both,) = embed(["a tall tree"], Heads.DENSE | Heads.SPARSE, backend=backend)

    assert len(backend.runs) == 1
    (dense,) = embed(["a tall tree"], Heads.DENSE, backend=backend)
    (sparse,) = embed(["a tall tree"], Heads.SPARSE, backend=backend)
    np.testing.assert_array_equal(both.dense, dense.dense)
    assert both.sparse.as_dict() == sparse.sparse.as_dict()


def test_texts_are_packed_by_the_cost_model():
    """Short texts run first and together, as the ceiling allows."""
    backend = FakeBackend()

    embed(["one two three four", "one", "two"], backend=backend, cost_model=CostModel(1.0, 0.0, 6))

    assert [run.batch.ids.shape for run in backend.runs] == [(2, 3), (1, 6)]


def test_no_texts_no_results():
    """An empty request does not touch the engine."""
    backend = FakeBackend()

    assert embed([], backend=backend) == []
    assert backend.runs == []


def test_padding_is_on_the_right():
    """Rows are as wide as the longest text, filled with ``<pad>`` under a zero mask."""
    batch = pad(tokenized("", "one two"))

    one, two = FakeTokenizer().word_id("one"), FakeTokenizer().word_id("two")
    assert batch.ids.tolist() == [[0, 2, 1, 1], [0, one, two, 2]]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.lengths.tolist() == [2, 4]
    assert {batch.ids.dtype, batch.mask.dtype, batch.lengths.dtype} == {np.dtype(np.int64)}


def test_a_batch_has_one_position_at_least():
    """No engine is given an axis of length zero."""
    assert pad([]).ids.shape == (0, 1)


def test_every_pass_is_a_span_with_its_figures():
    """The span of a chunk carries its shape, its tokens and the estimate."""
    telemetry = RecordingTelemetry()
    cost_model = CostModel(10.0, 0.0, 60)

    Embedder(FakeTokenizer(), FakeBackend(), cost_model, telemetry).embed(["one", "", "one two"])

    assert telemetry.chunks == [
        ChunkStats(batch=2, max_tokens=3, total_tokens=5, estimated_bytes=60),
        ChunkStats(batch=1, max_tokens=4, total_tokens=4, estimated_bytes=40),
    ]


def test_the_span_lasts_as_long_as_the_pass():
    """It has not ended while the engine works, and it ends when the engine fails."""
    telemetry = RecordingTelemetry()
    ended_during_run = []

    class Observed(FakeBackend):
        def run(self, batch, outputs):
            ended_during_run.append(len(telemetry.chunks))
            return super().run(batch, outputs)

    failing = Observed(error=InferenceError("no"))
    with pytest.raises(InferenceError):
        embed_chunk(tokenized("one"), Heads.DENSE, failing, telemetry)

    assert ended_during_run == [0]
    assert len(telemetry.chunks) == 1


def test_no_telemetry_is_a_telemetry():
    """Spans that nobody records let the work through."""
    silent = NoTelemetry()

    with silent.request("/v1/embeddings", {"texts": 1}), silent.chunk(ChunkStats(1, 3, 3)):
        pass

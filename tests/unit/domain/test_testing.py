"""The fakes keep the promises of the ports they stand in for."""

import numpy as np
import pytest
from bge_m3_server.domain import ChunkStats, GraphLayout, Heads, InferenceError, l2_normalise
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.testing import (
    FakeBackend,
    FakeClock,
    FakeTokenizer,
    RecordingTelemetry,
)
from hypothesis import given, settings
from hypothesis import strategies as st

EVERY_OUTPUT = {
    GraphLayout.SENTENCE_AND_TOKENS: ("sentence_embedding", "token_embeddings"),
    GraphLayout.LAST_HIDDEN_STATE: ("last_hidden_state",),
    GraphLayout.READY_HEADS: ("dense_vecs", "sparse_weights", "colbert_vecs"),
}


def batch_of(*texts):
    return pad(FakeTokenizer().encode(texts))


def test_tokenizer_makes_one_token_per_word():
    """Words stand between ``<s>`` and ``</s>``; equal words have equal ids."""
    (text,) = FakeTokenizer().encode(["one two\n one"])

    start, first, second, third, end = text.ids.tolist()
    assert (start, end) == (0, 2)
    assert first == third != second
    assert not text.truncated
    assert text.ids.dtype == np.int64


def test_tokenizer_ids_are_the_same_in_every_process():
    """Expected values can be written down."""
    assert FakeTokenizer().word_id("hello") == 71_758


def test_tokenizer_of_empty_text():
    """Text without words is ``<s></s>``."""
    assert [text.ids.tolist() for text in FakeTokenizer().encode(["", " \t"])] == [[0, 2], [0, 2]]


def test_tokenizer_cuts_to_its_limit_and_keeps_the_end():
    """``</s>`` closes a text that was cut, within the limit; one that just fits is not cut."""
    cut, whole = FakeTokenizer(max_tokens=4).encode(["a b c", "a b"])

    assert cut.ids.tolist() == whole.ids.tolist()
    assert len(cut) == 4
    assert (cut.truncated, whole.truncated) == (True, False)


@settings(deadline=None)
@given(st.text())
def test_tokenizer_takes_any_text(text):
    """No text breaks it, and no word gets the id of a special token."""
    (encoded,) = FakeTokenizer(max_tokens=16).encode([text])

    assert 2 <= len(encoded) <= 16
    assert all(3 < token < 250_001 for token in encoded.ids[1:-1].tolist())


@pytest.mark.parametrize("layout", GraphLayout)
def test_backend_gives_what_its_contract_names(layout):
    """Each layout has its real output names; a run returns those asked for and no other."""
    backend = FakeBackend(layout)
    contract = backend.contract

    assert contract.outputs_for(contract.heads) == EVERY_OUTPUT[layout]
    for name in EVERY_OUTPUT[layout]:
        outputs = backend.run(batch_of("one", "two words"), [name])
        assert outputs.keys() == {name}
        assert outputs[name].dtype == np.float32
        assert outputs[name].shape[0] == 2


def test_backend_offers_only_its_heads():
    """A dense-only model promises one head and carries no projection."""
    backend = FakeBackend(heads=Heads.DENSE)

    assert backend.contract.heads == Heads.DENSE
    assert backend.projections.sparse is None
    assert backend.projections.colbert is None


def test_backend_rows_do_not_see_their_neighbours():
    """A row is the same, to the bit, alone and beside a longer one."""
    alone = FakeBackend().run(batch_of("one two"), ["last_hidden_state"])["last_hidden_state"]
    beside = FakeBackend().run(batch_of("one two", "one two three four"), ["last_hidden_state"])

    np.testing.assert_array_equal(beside["last_hidden_state"][0, :4], alone[0])


def test_backend_padding_is_loud():
    """Whoever reads a padded position gets a number that no real state has."""
    states = FakeBackend().run(batch_of("", "one two"), ["last_hidden_state"])["last_hidden_state"]

    assert (states[0, 2:] == 1000).all()
    assert np.abs(states[0, :2]).max() < 10


def test_backend_tells_texts_and_positions_apart():
    """Other words, or the same words in another order, give another ``<s>`` state."""
    backend = FakeBackend(GraphLayout.SENTENCE_AND_TOKENS)
    batch = batch_of("one two", "two one", "one three")

    dense = backend.run(batch, ["sentence_embedding"])["sentence_embedding"]

    unit = l2_normalise(dense)
    similarities = unit @ unit.T
    assert (similarities[~np.eye(3, dtype=bool)] < 0.99).all()


def test_backend_remembers_its_runs():
    """Batches and outputs of each call are kept, those of a failed call too."""
    backend = FakeBackend()
    batch = batch_of("one")
    backend.run(batch, ["last_hidden_state"])
    backend.error = InferenceError("out of memory")

    with pytest.raises(InferenceError, match="out of memory"):
        backend.run(batch, ["last_hidden_state"])

    assert [(run.batch, run.outputs) for run in backend.runs] == [
        (batch, ("last_hidden_state",))
    ] * 2


@pytest.mark.parametrize("layout", GraphLayout)
def test_backend_gives_nan_for_one_text(layout):
    """Every output of the text that holds `nan_id` is NaN, the other text is finite."""
    backend = FakeBackend(layout, nan_id=FakeTokenizer().word_id("bad"))

    outputs = backend.run(batch_of("bad day", "good day"), EVERY_OUTPUT[layout])

    for values in outputs.values():
        assert np.isnan(values[0]).all()
        assert np.isfinite(values[1]).all()


def test_backend_remembers_that_it_was_closed():
    """A test can see whether the model's memory was given back."""
    backend = FakeBackend()
    assert not backend.closed

    backend.close()

    assert backend.closed


def test_clock_moves_by_hand():
    """Time passes only when told to, and never backwards."""
    clock = FakeClock()
    clock.advance(2.5)
    clock.advance(0)

    assert clock() == 2.5
    with pytest.raises(ValueError, match="never goes backwards"):
        clock.advance(-1)


def test_telemetry_records_spans_when_they_end():
    """A request is recorded after the chunks inside it, with its attributes."""
    telemetry = RecordingTelemetry()
    stats = ChunkStats(batch=1, max_tokens=3, total_tokens=3)

    with telemetry.request("/v1/embeddings", {"texts": 1}):
        with telemetry.chunk(stats):
            assert telemetry.chunks == []
        assert telemetry.requests == []

    assert telemetry.chunks == [stats]
    assert telemetry.requests == [("/v1/embeddings", {"texts": 1})]


def test_telemetry_records_a_request_that_failed():
    """An error ends its span and goes on."""
    telemetry = RecordingTelemetry()

    with pytest.raises(InferenceError), telemetry.request("/v1/embeddings", {}):
        raise InferenceError("no")

    assert telemetry.requests == [("/v1/embeddings", {})]

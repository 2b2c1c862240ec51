"""Which texts share a forward pass."""

import itertools

import pytest
from bge_m3_server.domain import Chunk, CostModel, bin_pack
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 1024**3

lengths_of_a_request = st.lists(st.integers(1, 8192), max_size=200)
cost_models = st.builds(
    CostModel,
    a_bytes_per_token=st.floats(0, 20_000),
    b_bytes_per_token_sq=st.floats(0, 200),
    max_workspace_bytes=st.integers(0, 2_000_000_000),
)


def linear(max_workspace_bytes, a=1.0):
    return CostModel(a, 0.0, max_workspace_bytes)


def indices_of(chunks):
    return [chunk.indices for chunk in chunks]


def test_no_texts_no_chunks():
    """An empty request needs no forward pass."""
    assert bin_pack([], linear(100)) == []


def test_one_text():
    """A single text is one chunk as wide as itself."""
    assert bin_pack([100], linear(1000)) == [Chunk(indices=(0,), max_tokens=100)]


def test_everything_that_fits_shares_a_chunk():
    """Ten short texts under a wide ceiling run together."""
    (chunk,) = bin_pack([50] * 10, linear(10_000))

    assert sorted(chunk.indices) == list(range(10))
    assert chunk.max_tokens == 50


def test_texts_that_do_not_fit_together_run_alone():
    """Three texts of 60 tokens under a ceiling of 100 give three chunks."""
    assert indices_of(bin_pack([60] * 3, linear(100))) == [(0,), (1,), (2,)]


def test_a_chunk_is_filled_up_to_the_ceiling():
    """Two texts of 50 tokens meet a ceiling of 100 exactly and run together."""
    assert indices_of(bin_pack([50, 50, 50], linear(100))) == [(0, 1), (2,)]


def test_a_long_text_does_not_widen_the_short_ones():
    """One text of 900 tokens among a hundred of 5 runs alone, last."""
    chunks = bin_pack([5] * 50 + [900] + [5] * 50, linear(1000))

    assert chunks[-1] == Chunk(indices=(50,), max_tokens=900)
    assert sorted(i for chunk in chunks for i in chunk.indices) == list(range(101))


def test_mixed_lengths_keep_their_order_of_length():
    """Chunks hold neighbours in length, equal lengths in the order they came."""
    lengths = [32, 64, 128, 256, 512, 256, 128, 64, 32, 512]

    assert indices_of(bin_pack(lengths, linear(5000, a=10.0))) == [
        (0, 8, 1, 7),
        (2, 6),
        (3,),
        (5,),
        (4,),
        (9,),
    ]


def test_zero_ceiling_runs_every_text_alone():
    """With no workspace at all nothing is dropped."""
    assert indices_of(bin_pack([10] * 5, linear(0))) == [(0,), (1,), (2,), (3,), (4,)]


def test_a_text_over_the_ceiling_runs_alone():
    """A text that fits nowhere still gets its chunk, and the next one does not join it."""
    assert indices_of(bin_pack([100], linear(50))) == [(0,)]
    assert indices_of(bin_pack([100, 10], linear(50))) == [(1,), (0,)]


def test_short_texts_get_larger_batches():
    """Texts of 512 tokens are batched more than five times as widely as those of 8192."""
    model = CostModel(16384.0, 8.0, 2 * GIB)

    short = 300 / len(bin_pack([512] * 300, model))
    long = 10 / len(bin_pack([8192] * 10, model))

    assert short > 5 * long


@pytest.mark.parametrize(
    ("lengths", "max_tokens"), [([512] * 205, [512, 512]), ([8192] * 4, [8192, 8192])]
)
def test_one_more_than_fits_opens_a_second_chunk(lengths, max_tokens):
    """The largest batch that fits is the one that is made."""
    chunks = bin_pack(lengths, CostModel(16384.0, 8.0, 2 * GIB))

    assert [len(chunk) for chunk in chunks] == [len(lengths) - 1, 1]
    assert [chunk.max_tokens for chunk in chunks] == max_tokens


@settings(deadline=None)
@given(lengths_of_a_request, cost_models)
def test_every_text_runs_exactly_once(lengths, model):
    """Nothing is lost and nothing runs twice, whatever the lengths and the ceiling."""
    chunks = bin_pack(lengths, model)

    assert sorted(i for chunk in chunks for i in chunk.indices) == list(range(len(lengths)))
    assert all(chunk.indices for chunk in chunks)


@settings(deadline=None)
@given(lengths_of_a_request, cost_models)
def test_the_ceiling_is_kept(lengths, model):
    """Only a text that exceeds the ceiling by itself is let over it, and it runs alone."""
    for chunk in bin_pack(lengths, model):
        assert chunk.max_tokens == max(lengths[i] for i in chunk.indices)
        assert len(chunk) == 1 or model.fits(len(chunk), chunk.max_tokens)


@settings(deadline=None)
@given(lengths_of_a_request, cost_models)
def test_texts_come_out_shortest_first(lengths, model):
    """Lengths ascend within a chunk and from chunk to chunk."""
    walked = [lengths[i] for chunk in bin_pack(lengths, model) for i in chunk.indices]

    assert walked == sorted(lengths)


@settings(deadline=None)
@given(lengths_of_a_request, cost_models)
def test_a_chunk_is_closed_only_when_the_next_text_does_not_fit(lengths, model):
    """No chunk could have taken the first text of the one after it."""
    chunks = bin_pack(lengths, model)

    for chunk, following in itertools.pairwise(chunks):
        assert not model.fits(len(chunk) + 1, lengths[following.indices[0]])

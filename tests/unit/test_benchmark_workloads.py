"""The benchmark's work: lengths and texts."""

import pytest

from benchmarks.performance.workloads import (
    MAX_WORD_LETTERS,
    Spread,
    lengths_of_sum,
    log_normal_lengths,
    text_maker,
    workloads,
)
from tests.support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tiny_tokenizer(400).to_str(), encoding="utf-8")
    return text_maker(path)


def test_lengths_of_a_sum_are_between_their_ends():
    """The sum is exact, both ends occur, and the same seed gives the same lengths."""
    lengths = lengths_of_sum(64, 5832, Spread(3, 528, 1.0, seed=3))
    assert (len(lengths), sum(lengths), min(lengths), max(lengths)) == (64, 5832, 3, 528)
    assert lengths == lengths_of_sum(64, 5832, Spread(3, 528, 1.0, seed=3))
    assert lengths != lengths_of_sum(64, 5832, Spread(3, 528, 1.0, seed=4))


@pytest.mark.parametrize("total", [800, 9_000, 19_000])
def test_any_possible_sum_is_reached(total):
    """Also where nearly all texts are as short, or as long, as they may be."""
    lengths = lengths_of_sum(40, total, Spread(3, 528, 1.0, seed=1))
    assert (sum(lengths), min(lengths), max(lengths)) == (total, 3, 528)


@pytest.mark.parametrize("total", [10, 100_000])
def test_an_impossible_sum_is_refused(total):
    """Instead of searching for it without end."""
    with pytest.raises(ValueError, match="cannot have"):
        lengths_of_sum(40, total, Spread(3, 528, 1.0, seed=1))


def test_log_normal_lengths_are_cut_to_their_ends():
    """However far the distribution spreads."""
    lengths = log_normal_lengths(500, 128, Spread(8, 2048, 3.0, seed=1))
    assert (len(lengths), min(lengths), max(lengths)) == (500, 8, 2048)


def test_the_rows_hold_what_they_are_called():
    """Names and tokens agree, and the known loads have their known sizes."""
    rows = {row.name: row for row in workloads()}
    for name in ("1×16", "8×128", "32×64", "4×512", "1×2048", "1×8192"):
        count, length = map(int, name.split("×"))
        assert rows[name].lengths == (length,) * count
    assert rows["32×~160"].tokens == 32 * 160
    assert rows["64 mixed"].tokens == 5832
    assert [rows[f"queries at {clients}"].concurrency for clients in (1, 8, 32)] == [1, 8, 32]


def test_quick_rows_are_small():
    """A trial of the programs is a matter of seconds."""
    quick = workloads(quick=True)
    assert [row.name for row in quick] == [row.name for row in workloads()]
    assert max(row.tokens for row in quick) <= 4 * 128


def test_texts_have_the_tokens_that_were_asked_for(maker):
    """Counted by the tokenizer of the model, special tokens included."""
    lengths = [2, 3, 12, 64]
    texts = maker.texts("row", 0, lengths)
    assert [len(encoding.ids) for encoding in maker.tokenizer.encode_batch(texts)] == lengths


def test_words_are_short(tmp_path):
    """So that the longest text is within the limit of characters that a server may have."""
    path = tmp_path / "tokenizer.json"
    tiny = tiny_tokenizer(400).to_str()
    path.write_text(tiny.replace("▁hello", "▁helloworld"), encoding="utf-8")
    words = text_maker(path).words
    assert "world" in words
    assert "helloworld" not in words
    assert max(map(len, words)) <= MAX_WORD_LETTERS


def test_every_variant_has_texts_of_its_own(maker):
    """So no cache can answer, and yet the same variant is the same on every machine."""
    texts = [maker.texts("row", variant, [30])[0] for variant in range(20)]
    assert len(set(texts)) == 20
    assert maker.texts("row", 7, [30]) == [texts[7]]
    assert maker.texts("another row", 7, [30]) != [texts[7]]

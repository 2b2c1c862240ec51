"""Which lengths may share a chunk, and how little padding that leaves."""

import numpy as np
import pytest
from bge_m3_server.domain.binpack import bin_pack
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.padding import ANY_PADDING, GPU_PADDING, PaddingRule, cpu_padding
from bge_m3_server.domain.scheduling import Scheduler
from bge_m3_server.domain.testing import FakeClock
from hypothesis import given
from hypothesis import strategies as st

ROOMY = CostModel(1.0, 0.0, 4096)

tokens = st.integers(1, 8192)
FREE_MASKS = cpu_padding(2, are_masks_free=True)

rules = st.sampled_from([ANY_PADDING, GPU_PADDING, cpu_padding(1), cpu_padding(8), FREE_MASKS])


@given(rules, tokens)
def test_equal_lengths_always_share(rule, length):
    """There is nothing to pad."""
    assert rule.allows(length, length)


@given(rules, tokens, tokens, tokens)
def test_a_rule_that_allows_two_lengths_allows_what_lies_between(rule, first, second, third):
    """So a chunk can be filled text by text from its leader outwards."""
    shortest, middle, longest = sorted([first, second, third])
    if rule.allows(shortest, longest):
        assert rule.allows(middle, longest)
        assert rule.allows(shortest, middle)


def test_long_texts_are_never_padded_on_a_cpu():
    """From 32 tokens per thread on, only equal lengths share a chunk."""
    rule = cpu_padding(threads=2)
    assert rule.allows(62, 64)
    assert not rule.allows(64, 65)
    assert not rule.allows(700, 701)
    assert cpu_padding(threads=8).allows(250, 256)


@given(st.lists(st.integers(1, 300), max_size=40))
def test_packing_obeys_the_rule_and_loses_nothing(lengths):
    """Each text is in one chunk, whose lengths may share one."""
    rule = PaddingRule(short_tokens=64, stretch=1.1, slack_tokens=1)
    chunks = bin_pack(lengths, ROOMY, rule)
    assert sorted(index for chunk in chunks for index in chunk.indices) == list(range(len(lengths)))
    for chunk in chunks:
        inside = [lengths[index] for index in chunk.indices]
        assert rule.allows(min(inside), max(inside))


def test_where_masks_are_free_texts_within_three_percent_share():
    """Long ones as well."""
    assert FREE_MASKS.allows(1000, 1030)
    assert not FREE_MASKS.allows(1000, 1040)


@pytest.mark.parametrize("rule", [cpu_padding(2), FREE_MASKS], ids=["no masks", "free masks"])
def test_a_mixed_corpus_is_padded_by_less_than_three_percent(rule):
    """Log-normal lengths from 8 to 2048, scheduled as a server on two threads does."""
    drawn = np.random.default_rng(3).lognormal(mean=np.log(128), sigma=1.0, size=512)
    lengths = np.clip(drawn.astype(int), 8, 2048).tolist()
    scheduler = Scheduler(FakeClock())
    scheduler.submit(lengths)
    positions = 0
    while chunk := scheduler.take(CostModel(1.0, 0.0, 4096), padding=rule):
        positions += len(chunk) * chunk.max_tokens
    assert sum(lengths) <= positions <= 1.03 * sum(lengths)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), rules)
def test_the_scheduler_obeys_the_rule(lengths, rule):
    """No chunk holds lengths that may not share one."""
    scheduler = Scheduler(FakeClock())
    scheduler.submit(lengths)
    taken = 0
    while chunk := scheduler.take(ROOMY, padding=rule):
        inside = [text.tokens for text in chunk.texts]
        assert rule.allows(min(inside), max(inside))
        taken += len(inside)
    assert taken == len(lengths)

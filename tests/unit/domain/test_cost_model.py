"""The workspace estimate and what fits under its ceiling."""

import math

import pytest
from bge_m3_server.domain import CostModel
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 1024**3


def low_attention(max_workspace_bytes=2 * GIB):
    """Coefficients with round results: 16 KiB per token, 8 bytes per token pair."""
    return CostModel(16384.0, 8.0, max_workspace_bytes)


@pytest.mark.parametrize(
    ("count", "max_tokens", "expected_bytes"),
    [
        (1, 64, 1_081_344),
        (4, 64, 4_325_376),
        (1, 256, 4_718_592),
        (1, 512, 10_485_760),
        (16, 512, 167_772_160),
        (1, 1024, 25_165_824),
        (1, 2048, 67_108_864),
        (1, 4096, 201_326_592),
        (1, 8192, 671_088_640),
        (3, 8192, 2_013_265_920),
        (4, 8192, 2_684_354_560),
    ],
)
def test_cost_of_known_shapes(count, max_tokens, expected_bytes):
    """Both terms add up to the byte."""
    assert low_attention().chunk_cost_bytes(count, max_tokens) == expected_bytes


@pytest.mark.parametrize(
    ("budget_bytes", "max_tokens", "largest_batch"),
    [
        *[
            (2 * GIB, tokens, batch)
            for tokens, batch in [
                (32, 4032),
                (64, 1985),
                (128, 963),
                (256, 455),
                (512, 204),
                (1024, 85),
                (2048, 32),
                (4096, 10),
                (8192, 3),
            ]
        ],
        *[
            (10 * GIB, tokens, batch)
            for tokens, batch in [
                (64, 9929),
                (128, 4818),
                (256, 2275),
                (512, 1024),
                (1024, 426),
                (2048, 160),
                (4096, 53),
                (8192, 16),
            ]
        ],
    ],
)
def test_largest_batch_of_known_budgets(budget_bytes, max_tokens, largest_batch):
    """The largest batch fits and one more text does not."""
    model = low_attention(budget_bytes)

    assert model.fits(largest_batch, max_tokens)
    assert not model.fits(largest_batch + 1, max_tokens)


def test_linear_term_alone():
    """Without attention the cost is a × positions."""
    assert CostModel(100.0, 0.0, 0).chunk_cost_bytes(4, 128) == 51_200


def test_quadratic_term_alone():
    """Without activations the cost is b × positions × tokens."""
    assert CostModel(0.0, 1.0, 0).chunk_cost_bytes(2, 64) == 8_192


def test_each_term_is_rounded_down_on_its_own():
    """Halves of a byte in both terms do not add up to a byte."""
    assert CostModel(0.5, 0.5, 0).chunk_cost_bytes(1, 1) == 0
    assert CostModel(1.5, 1.5, 0).chunk_cost_bytes(1, 1) == 2


def test_a_chunk_that_meets_the_ceiling_fits():
    """The ceiling is inclusive, to the byte."""
    cost = low_attention().chunk_cost_bytes(3, 100)

    assert low_attention(cost).fits(3, 100)
    assert not low_attention(cost - 1).fits(3, 100)


def test_ceiling_below_one_text():
    """What is over the ceiling does not fit."""
    model = CostModel(1.0, 0.0, 100)

    assert model.fits(1, 50)
    assert not model.fits(3, 50)


def test_conservative_counts_rows_per_token_and_copies_per_pair():
    """24 float32 rows per token, and three float32 per head and token pair."""
    assert CostModel.conservative() == CostModel(98_304.0, 192.0, 2 * GIB)
    assert CostModel.conservative(attention_heads=12).b_bytes_per_token_sq == 144.0
    assert CostModel.conservative(hidden_size=384).a_bytes_per_token == 36_864.0
    assert CostModel.conservative(5).max_workspace_bytes == 5


def test_conservative_lets_a_usual_batch_pass():
    """Sixteen texts of 512 tokens run together within the default ceiling."""
    assert CostModel.conservative().fits(16, 512)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_coefficients_must_be_finite_and_not_negative(bad):
    """A coefficient that cannot be compared with a ceiling is refused by name."""
    with pytest.raises(ValueError, match=f"a_bytes_per_token must be .* got {bad}"):
        CostModel(bad, 0.0, 0)
    with pytest.raises(ValueError, match="b_bytes_per_token_sq"):
        CostModel(0.0, bad, 0)


def test_ceiling_must_not_be_negative():
    """A negative ceiling is refused, zero is allowed."""
    assert not CostModel(1.0, 0.0, 0).fits(1, 1)
    with pytest.raises(ValueError, match="max_workspace_bytes"):
        CostModel(1.0, 0.0, -1)


@settings(deadline=None)
@given(
    a=st.floats(0, 1e6),
    b=st.floats(0, 1e4),
    count=st.integers(1, 512),
    max_tokens=st.integers(1, 8192),
)
def test_cost_grows_with_the_chunk(a, b, count, max_tokens):
    """One more text or one more token never costs less."""
    model = CostModel(a, b, 0)
    cost = model.chunk_cost_bytes(count, max_tokens)

    assert model.chunk_cost_bytes(count + 1, max_tokens) >= cost
    assert model.chunk_cost_bytes(count, max_tokens + 1) >= cost

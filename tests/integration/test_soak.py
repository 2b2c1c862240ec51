"""The soak benchmark in brief, over a smaller model."""

from benchmarks import soak
from benchmarks.synthetic_bge_m3 import Shape

SMALL = Shape(layers=2, hidden=64, attention_heads=1, intermediate=256)


def test_memory_comes_back_after_a_long_text_and_does_not_grow():
    """A text of 8192 tokens takes far more than the model, and leaves nothing of it behind."""
    report = soak.run(requests=40, shape=SMALL, long_texts=1, samples=4)

    assert report.peak_bytes > 3 * report.before_bytes
    assert report.problems() == [], report

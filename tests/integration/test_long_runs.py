"""A minute of each of the long benchmarks, with their own judgement."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from benchmarks import faults, load, soak
from benchmarks.synthetic_bge_m3 import Shape

SECONDS = 60
SMALL = Shape(layers=2, hidden=64, attention_heads=1, intermediate=256)


@pytest.fixture(scope="module")
def reports():
    """All of them side by side, each in a process of its own: together they leave a CPU idle."""
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as processes:
        yield {
            "load": processes.submit(load.run, SECONDS),
            "faults": processes.submit(faults.run, SECONDS),
            "soak": processes.submit(soak.run, 400, SMALL),
        }


def test_every_answer_under_load_belongs_to_its_text(reports):
    """Nothing is lost, doubled, mixed up or reset, and nobody waits behind the bulk.

    HTTP leaves the engine its speed, and memory does not grow.
    """
    report = reports["load"].result()

    assert report.problems() == []
    assert report.bulk.answers[200] > 1
    assert report.small.answers[200] > 20 * load.CLIENTS


def test_random_faults_end_in_right_answers_or_typed_errors(reports):
    """While workers raise, die, hang and run out of memory, nobody is lost; then all is well."""
    report = reports["faults"].result()

    assert report.problems() == []
    assert report.faults > 100


def test_memory_comes_back_after_a_long_text_and_does_not_grow(reports):
    """A text of 8192 tokens takes far more than the model, and leaves nothing of it behind."""
    report = reports["soak"].result()

    assert report.problems() == []
    assert report.peak_bytes > 3 * report.before_bytes

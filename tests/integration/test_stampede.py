"""The stampede benchmark, with what it must find every time."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from benchmarks import stampede


def test_a_thousand_clients_at_once_get_an_answer_each():
    """A full queue answers 429 with the time to come back, and never grows beyond its bound.

    Meanwhile `/live` answers on new connections, before the server does much else. All of it runs
    in a process of its own: measuring coverage takes CPU time, too.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        report = process.submit(stampede.run, 1000).result()

    assert report.problems() == []
    assert set(report.answers) == {200, 429}
    assert report.answers.total() == 1000
    assert report.live_answers > 1

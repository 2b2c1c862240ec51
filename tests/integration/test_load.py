"""The load and stampede benchmarks in brief, with what they must find every time."""

from benchmarks import load, stampede


def test_every_answer_under_load_belongs_to_its_text():
    """Small clients and a bulk one are all served; nothing is lost, doubled, mixed up or reset."""
    report = load.run(seconds=4)

    for tally in (report.small, report.bulk):
        assert set(tally.answers) == {200}
        assert (tally.wrong, tally.resets) == (0, 0)
    assert report.growth_bytes < 32 * 1024**2
    assert report.bulk.answers[200] >= 1
    assert report.small.answers[200] > 2 * load.CLIENTS


def test_a_thousand_clients_at_once_get_an_answer_each():
    """A full queue answers 429 with the time to come back, and never grows beyond its bound.

    Meanwhile `/live` answers on new connections.
    """
    report = stampede.run(clients=1000)

    assert set(report.answers) == {200, 429}
    assert report.answers.total() == 1000
    assert report.resets == 0
    assert report.hints_missing == 0
    assert report.largest_queue_tokens <= stampede.QUEUE_TOKENS
    assert report.live_answers > 1

"""The fault benchmark in brief."""

from benchmarks import faults


def test_random_faults_end_in_right_answers_or_typed_errors():
    """While workers raise, die, hang and run out of memory, nobody is lost; then all is well."""
    report = faults.run(seconds=5)

    assert report.faults > 10
    assert report.problems() == []

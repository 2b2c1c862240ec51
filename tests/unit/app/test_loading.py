"""How the self-test of a model is run."""

from functools import partial

import pytest
from bge_m3_server.app.loading import run_self_test
from bge_m3_server.domain.errors import InferenceError, SelfTestError
from bge_m3_server.domain.self_test import self_test
from bge_m3_server.domain.testing import FakeTokenizer

from tests.support.fault_backend import Fault, FaultBackend


def test_a_model_that_answers_passes():
    """It has run, and nothing is raised."""
    backend = FaultBackend()

    run_self_test(partial(self_test, FakeTokenizer(), backend), limit_seconds=30)

    assert backend.runs


def test_what_is_wrong_with_a_model_is_said():
    """The message of the test is that of the failure."""
    test = partial(self_test, FakeTokenizer(), FaultBackend(error=InferenceError("no kernel")))

    with pytest.raises(SelfTestError, match="no kernel"):
        run_self_test(test, limit_seconds=30)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.HANG, r"within 0\.1 s, the limit of BGE_M3_HANG_TIMEOUT_SECS"),
        (Fault.DIE, "ended the thread"),
    ],
)
def test_nobody_waits_for_ever(fault, message):
    """An engine that hangs or ends its thread has failed."""
    stuck = FaultBackend()
    stuck.next_faults.append(fault)

    try:
        with pytest.raises(SelfTestError, match=message):
            run_self_test(partial(self_test, FakeTokenizer(), stuck), limit_seconds=0.1)
    finally:
        stuck.released.set()

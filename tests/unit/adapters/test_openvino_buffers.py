"""What OpenVINO keeps between runs, and when it is given back."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from bge_m3_server.adapters.openvino.backend import (
    OpenVinoBackend,
    OpenVinoSettings,
    load_openvino_backend,
)
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.testing import FakeBackend
from bge_m3_server.domain.types import HeadProjections

from tests.support.graphs import texts
from tests.support.openvino_mark import needs_openvino
from tests.support.tiny_models import write_tiny_model


@attrs.define(eq=False)
class Compiled:
    """A compiled model that computes nothing and notes what it is told, in order."""

    told: list = attrs.field(factory=list)
    is_busy: bool = False

    def create_infer_request(self):
        return SimpleNamespace(
            start_async=lambda inputs, **_: self.told.append(inputs["input_ids"].shape),
            wait=lambda: None,
            get_tensor=lambda _: SimpleNamespace(data=np.zeros(1)),
        )

    def release_memory(self):
        if self.is_busy:
            raise RuntimeError("Attempt to call release_memory() in a busy state")
        self.told.append("release")


def backend_over(compiled):
    return OpenVinoBackend(FakeBackend().contract, HeadProjections(), lambda: compiled, compiled)


def run(backend, *lengths):
    backend.run(pad(texts(*lengths)), ["last_hidden_state"])


def test_buffers_are_given_back_before_they_grow():
    """Else the engine would hold old and new ones at once; smaller runs use what is there."""
    compiled = Compiled()
    backend = backend_over(compiled)
    for lengths in ((5, 5), (5,), (5, 5), (6, 6), (5, 5)):
        run(backend, *lengths)

    assert compiled.told == [(2, 5), (1, 5), (2, 5), "release", (2, 6), (2, 5)]


def test_buffers_are_given_back_when_told_to():
    """Once: the next run makes new ones, whatever its size."""
    compiled = Compiled()
    backend = backend_over(compiled)
    run(backend, 5)
    backend.release()
    run(backend, 9)

    assert compiled.told == [(1, 5), "release", (1, 9)]


def test_an_engine_at_work_keeps_its_buffers():
    """It refuses to give them back, and that is no failure."""
    compiled = Compiled(is_busy=True)
    backend = backend_over(compiled)
    run(backend, 5)
    run(backend, 9)
    backend.release()

    assert compiled.told == [(1, 5), (1, 9)]


def test_a_closed_backend_has_none():
    """Releasing it is harmless."""
    compiled = Compiled()
    backend = backend_over(compiled)
    backend.close()
    backend.release()

    assert compiled.told == []


@needs_openvino
@pytest.mark.parametrize("streams", [1, 2])
def test_the_engine_runs_on_after_a_release(tmp_path, streams):
    """The same vectors come out, before and after, for shapes that ran and for larger ones."""
    backend = load_openvino_backend(
        write_tiny_model(tmp_path), HeadProjections(), OpenVinoSettings(1, streams, "f32")
    )
    small, large = pad(texts(5)), pad(texts(9, 9))
    (output,) = backend.contract.outputs_for(backend.contract.heads)[:1]
    before = [backend.run(batch, [output])[output] for batch in (small, large)]
    backend.release()
    after = [backend.run(batch, [output])[output] for batch in (small, large)]

    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)

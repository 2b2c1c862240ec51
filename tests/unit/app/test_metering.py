"""Readings of forward passes: only those that nothing else can have raised."""

import threading

import attrs
import numpy as np
import pytest
from bge_m3_server.adapters.memory.peak import peak_memory
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.session import SessionSettings, load_backend
from bge_m3_server.app.metering import MeteredBackend, PassMeter, ProbeMeter, probe_batch
from bge_m3_server.domain.errors import InferenceError
from bge_m3_server.domain.testing import FakeBackend
from bge_m3_server.domain.types import HeadProjections, ResidentMemory

from tests.support.tiny_models import write_tiny_model

MIB = 1024**2


@attrs.define
class FakeMemory:
    """Peak memory that rises when told to."""

    anonymous: int = 1000
    file: int = 500
    peak: int = 0
    resets: int = 0

    def resident(self):
        return ResidentMemory(self.anonymous, self.file)

    def reset_peak(self):
        self.resets += 1
        self.peak = self.anonymous + self.file

    def peak_bytes(self):
        return self.peak

    def rise(self, amount):
        self.peak = max(self.peak, self.anonymous + self.file + amount)


@attrs.define
class CostlyBackend(FakeBackend):
    """A fake model whose passes need 10 bytes a position, and keep some of it if asked to.

    `padded_extra`, `plain_extra`: what a pass with padding, or without, needs on top.
    `buffers`: what each pass leaves until it is released.
    """

    memory: FakeMemory = attrs.field(factory=FakeMemory)
    keeps: int = 0
    maps: int = 0
    padded_extra: int = 0
    plain_extra: int = 0
    buffers: int = 0
    held: int = 0

    def run(self, batch, outputs):
        self.memory.file += self.maps
        extra = self.plain_extra if batch.mask.all() else self.padded_extra
        self.memory.rise(10 * batch.ids.size + extra)
        self.memory.anonymous += self.keeps + self.buffers
        self.held += self.buffers
        return super().run(batch, outputs)

    def release(self):
        self.memory.anonymous -= self.held
        self.held = 0


def no_trim():
    """An allocator that keeps nothing."""


@pytest.fixture
def memory():
    return FakeMemory()


def test_a_pass_that_is_alone_has_a_reading(memory):
    """The peak is reset before and read after the pass."""
    memory.peak = 999_999
    with PassMeter(memory).forward_pass() as reading:
        memory.rise(70)

    assert reading.before == ResidentMemory(1000, 500)
    assert reading.peak_bytes == 1570


def test_passes_that_overlap_have_none(memory):
    """Neither the one that began first nor the one that joined it is credible."""
    meter = PassMeter(memory)
    with meter.forward_pass() as first:
        with meter.forward_pass() as second:
            memory.rise(70)
        assert memory.resets == 1
    with meter.forward_pass() as third:
        memory.rise(7)

    assert first.peak_bytes is None
    assert second.peak_bytes is None
    assert third.peak_bytes == 1507


def test_a_pass_that_joined_and_outlived_the_first_has_none(memory):
    """What began in company stays without a reading though it ends alone."""
    meter = PassMeter(memory)
    first, second = meter.forward_pass(), meter.forward_pass()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)

    assert (one.peak_bytes, two.peak_bytes) == (None, None)


def test_a_failed_pass_leaves_the_meter_intact(memory):
    """After an error the next pass is alone again."""
    meter = PassMeter(memory)
    with pytest.raises(InferenceError), meter.forward_pass():
        raise InferenceError("broken")
    with meter.forward_pass() as reading:
        pass

    assert reading.peak_bytes is not None


def test_who_is_alone_holds_others_back(memory):
    """Passes of other threads begin when the reserved time is over, and are undisturbed then."""
    meter, began = PassMeter(memory), threading.Event()

    def other():
        with meter.forward_pass():
            began.set()

    thread = threading.Thread(target=other)
    with meter.alone() as is_alone:
        thread.start()
        with meter.forward_pass() as own:
            assert not began.wait(0.1)
    thread.join(30)

    assert is_alone
    assert own.peak_bytes is not None
    assert began.is_set()


def test_being_alone_begins_when_the_last_pass_ends(memory):
    """What is running is waited for."""
    meter, release, running = PassMeter(memory), threading.Event(), threading.Event()

    def other():
        with meter.forward_pass():
            running.set()
            assert release.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert running.wait(30)
    with meter.alone(wait_seconds=0.01) as is_alone:
        assert not is_alone
        with meter.forward_pass() as disturbed:
            pass
    release.set()
    with meter.alone() as is_alone:
        assert is_alone
    thread.join(30)

    assert disturbed.peak_bytes is None


def test_many_threads(memory):
    """However passes interleave, the meter ends up idle."""
    meter = PassMeter(memory)

    def work():
        for _ in range(50):
            with meter.forward_pass():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with meter.forward_pass() as reading:
        pass
    assert reading.peak_bytes is not None


def test_metered_backend_is_the_backend(memory):
    """It gives the same results, and reports shape and rise of each pass."""
    inner, seen = CostlyBackend(memory=memory), []
    metered = MeteredBackend(inner, PassMeter(memory), lambda *figures: seen.append(figures))
    batch = probe_batch(2, 5)
    outputs = metered.run(batch, ["last_hidden_state"])

    np.testing.assert_array_equal(
        outputs["last_hidden_state"], inner.run(batch, ["last_hidden_state"])["last_hidden_state"]
    )
    assert seen == [(2, 5, 100)]
    assert metered.contract == inner.contract
    assert (metered.projections.sparse is None) == (inner.projections.sparse is None)
    metered.close()
    assert inner.closed


def test_metered_backend_reports_no_failed_pass(memory):
    """A pass that failed half-way tells nothing about the cost."""
    seen = []
    inner = CostlyBackend(memory=memory, error=InferenceError("broken"))
    with pytest.raises(InferenceError):
        MeteredBackend(inner, PassMeter(memory), lambda *figures: seen.append(figures)).run(
            probe_batch(1, 4), ["last_hidden_state"]
        )
    assert seen == []


def test_probe_peaks_include_what_the_allocator_keeps(memory):
    """Memory kept by one pass is reused by the next, so each peak counts from the loaded model."""
    probe = ProbeMeter(CostlyBackend(memory=memory, keeps=40), PassMeter(memory), no_trim)
    probe.warm_up()

    assert probe.peak_bytes(1, 10) == 100
    assert probe.peak_bytes(1, 20) == 40 + 200


def test_probe_passes_begin_trimmed(memory):
    """What the allocator can give back is given back before each pass, and before the baseline."""
    probe = ProbeMeter(
        CostlyBackend(memory=memory, keeps=40),
        PassMeter(memory),
        lambda: setattr(memory, "anonymous", 1000),
    )
    probe.warm_up()

    assert [probe.peak_bytes(1, 10) for _ in range(3)] == [100, 100, 100]


def test_probe_peaks_leave_mapped_files_out(memory):
    """Rows of the embedding table that traffic brought in are not workspace."""
    probe = ProbeMeter(CostlyBackend(memory=memory), PassMeter(memory), no_trim)
    probe.warm_up()
    memory.file += 10_000

    assert probe.peak_bytes(1, 10) == 100
    assert probe.resident_bytes() == 11_500


def test_probe_without_company_only(memory):
    """A measurement during another pass is none."""
    meter = PassMeter(memory)
    probe = ProbeMeter(CostlyBackend(memory=memory), meter, no_trim)
    with meter.forward_pass():
        assert probe.peak_bytes(1, 10) is None
    assert probe.peak_bytes(1, 10) is not None


def test_probe_peaks_leave_out_what_the_engine_kept_from_other_passes(memory):
    """Buffers of a larger pass are given back before a smaller one is measured."""
    probe = ProbeMeter(CostlyBackend(memory=memory, buffers=5000), PassMeter(memory), no_trim)
    probe.warm_up()

    assert probe.peak_bytes(1, 20) == 200
    assert probe.peak_bytes(1, 10) == 100


@pytest.mark.parametrize("needy", ["padded_extra", "plain_extra"])
def test_short_texts_are_measured_with_padding_and_without(memory, needy):
    """Engines have other ways through attention for each, and the larger peak counts."""
    backend = CostlyBackend(memory=memory, **{needy: 7000})
    probe = ProbeMeter(backend, PassMeter(memory), no_trim)
    probe.warm_up()

    assert probe.peak_bytes(8, 128) == 8 * 128 * 10 + 7000
    assert probe.peak_bytes(1, 128) == 128 * 10 + (7000 if needy == "plain_extra" else 0)


def test_probe_asks_for_every_output(memory):
    """A pass with all heads costs the most, on the layout's own outputs."""
    backend = CostlyBackend(memory=memory)
    ProbeMeter(backend, PassMeter(memory), no_trim).warm_up()

    assert set(backend.runs[0].outputs) == {"last_hidden_state"}


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 700)])
def test_probe_batch_has_the_exact_shape(shape):
    """No padding, special ids at both ends, one ordinary id between: every vocabulary has it."""
    batch = probe_batch(*shape)

    assert batch.ids.shape == batch.mask.shape == shape
    assert batch.mask.all()
    assert set(batch.ids.ravel()) <= {0, 2, 3}
    assert batch.lengths.tolist() == [shape[1]] * shape[0]


def test_a_real_engine_is_measured(tmp_path):
    """On ONNX Runtime, scores of 16 texts of 1024 tokens need 64 MiB at least, and are seen."""
    memory = peak_memory()
    if isinstance(memory, str):
        pytest.skip(memory)
    graph = write_tiny_model(tmp_path, positions=1026)
    backend = load_backend(
        graph, HeadProjections(), SessionSettings(1, tmp_path), cpu_providers(None)
    )
    probe = ProbeMeter(backend, PassMeter(memory), no_trim)
    probe.warm_up()

    assert probe.peak_bytes(16, 1024) > 64 * MIB


def test_mapped_files_that_a_pass_brings_in_are_not_its_workspace():
    """Rows of the embedding table come in with the first texts, and the kernel can drop them."""
    observed = []
    backend = CostlyBackend(maps=40 * MIB)
    metered = MeteredBackend(
        backend, PassMeter(backend.memory), lambda *reading: observed.append(reading)
    )
    metered.run(probe_batch(2, 100), ["last_hidden_state"])

    assert observed == [(2, 100, 2000)]

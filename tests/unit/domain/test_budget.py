"""How memory is shared, and what is refused."""

import re

import attrs
import pytest
from bge_m3_server.domain.budget import (
    Budget,
    conservative_coefficients,
    largest_batch,
    longest_text,
    require_fits,
    require_useful,
    tightest_limit,
)
from bge_m3_server.domain.cost_model import CostModel
from bge_m3_server.domain.errors import ConfigError, RequestTooLargeError
from bge_m3_server.domain.probe_fit import Coefficients
from bge_m3_server.domain.testing import FakeBackend
from bge_m3_server.domain.types import MemoryLimit
from hypothesis import given
from hypothesis import strategies as st

MIB = 1024**2
GIB = 1024**3
COEFFICIENTS = Coefficients(98_304.0, 192.0)


@attrs.frozen
class Says:
    """A memory probe with a fixed answer."""

    answer: MemoryLimit | None

    def limit(self):
        return self.answer


def budget(available_bytes, model_bytes, workers=2, safety_factor=0.7):
    return Budget(
        available_bytes=available_bytes,
        model_bytes=model_bytes,
        workers=workers,
        safety_factor=safety_factor,
    )


def test_the_tightest_source_counts():
    """A container's limit above what the host can give is no promise."""
    host, group = MemoryLimit(3 * GIB, "host_ram"), MemoryLimit(8 * GIB, "cgroup_v2")

    assert tightest_limit([Says(group), Says(None), Says(host)]) == host
    assert tightest_limit([Says(None)]) is None


@pytest.mark.parametrize(
    ("shares", "per_worker", "worst", "percent"),
    [
        (budget(28_672 * MIB, 7 * 1628 * MIB, 7), 1_784_676_352, 24_710_742_016, 82.19),
        (budget(20_543 * MIB, 7 * 8459 * MIB, 7), 0, 62_357_766_144, 289.5),
        (budget(8192 * MIB, 1100 * MIB, 1, 1.0), 7_168_065_536, 8_589_934_592, 100.0),
        (budget(28 * GIB, 7 * 1_080_000_000, 7), 2_223_633_561, 23_393_870_383, 77.81),
    ],
)
def test_shares_with_one_model_per_worker(shares, per_worker, worst, percent):
    """Known budgets of servers whose workers each load the model."""
    assert shares.workspace_bytes_per_worker == per_worker
    assert shares.worst_case_peak_bytes() == worst
    assert shares.utilization_pct() == pytest.approx(percent, abs=0.05)


def test_workers_share_one_model():
    """However many workers there are, the model is paid for once."""
    one, four = budget(8 * GIB, 2 * GIB, workers=1), budget(8 * GIB, 2 * GIB, workers=4)

    assert one.workspace_bytes == four.workspace_bytes
    assert four.workspace_bytes_per_worker == one.workspace_bytes_per_worker // 4
    assert four.model_bytes_per_worker == 512 * MIB


def test_a_pinned_workspace_changes_the_worst_case():
    """The worst case follows the workspace that is really used."""
    shares = budget(8 * GIB, 2 * GIB)

    assert shares.worst_case_peak_bytes(6 * GIB) == 8 * GIB + 256 * MIB
    assert shares.utilization_pct(6 * GIB) > 100.0
    assert budget(0, 0).utilization_pct() == 0.0


@given(
    available=st.integers(0, 2**40),
    model=st.integers(0, 2**38),
    workers=st.integers(1, 64),
    safety=st.floats(0.1, 1.0),
)
def test_shares_never_exceed_what_there_is(available, model, workers, safety):
    """Where anything is left at all, the worst case stays within the memory."""
    shares = budget(available, model, workers, safety)

    assert shares.workspace_bytes_per_worker * workers <= shares.workspace_bytes
    if shares.workspace_bytes_per_worker:
        assert shares.worst_case_peak_bytes() <= available


def test_conservative_figures_come_from_the_model():
    """24 rows of the hidden size for each token, 3 float32 per head for each pair."""
    contract = FakeBackend(hidden_size=1024).contract

    assert conservative_coefficients(contract) == COEFFICIENTS
    assert conservative_coefficients(attrs.evolve(contract, attention_heads=4)) == Coefficients(
        98_304.0, 48.0
    )
    assert conservative_coefficients(contract, bytes_per_value=2) == Coefficients(49_152.0, 96.0)


def test_conservative_figures_of_a_small_model_cover_what_the_allocator_keeps():
    """Highest of eight peaks of multilingual-e5-small on ONNX Runtime, whose tensors are small."""
    contract = attrs.evolve(FakeBackend(hidden_size=384).contract, attention_heads=12)
    conservative = conservative_coefficients(contract)
    measured = {(1, 64): 6.1, (4, 64): 22.7, (1, 256): 42.9, (8, 128): 95.2, (1, 512): 154.7,
                (4, 512): 198.2, (8, 512): 518.6, (16, 512): 652.4}  # fmt: skip
    for (batch, tokens), peak_mib in measured.items():
        assert conservative.cost_bytes(batch, tokens) >= peak_mib * MIB


def test_conservative_figures_cover_what_was_measured():
    """Peaks of a model of BGE-M3's shape on ONNX Runtime, short and long, alone and together."""
    measured = {(1, 64): 5.3, (4, 64): 23.8, (1, 256): 34.8, (1, 1024): 282, (1, 2048): 920,
                (1, 4096): 3359, (3, 700): 460, (2, 3000): 3690, (12, 150): 211}  # fmt: skip
    for (batch, tokens), peak_mib in measured.items():
        assert COEFFICIENTS.cost_bytes(batch, tokens) >= peak_mib * MIB


def test_impossible_memory_is_refused_with_the_arithmetic():
    """The message shows every figure and three ways out, the first of which works."""
    shares = budget(2 * GIB, 1500 * MIB, workers=4)
    with pytest.raises(ConfigError) as refusal:
        require_useful(shares, "cgroup_v1", COEFFICIENTS, 8192, is_8_bit=False)

    message = str(refusal.value)
    for figure in (
        "one text of 512 tokens",
        "2048 MiB available (cgroup_v1)",
        "1500 MiB resident",
        "256 MiB headroom",
        "0.7 safety factor / 4 workers",
        "51 MiB of workspace for each worker; 96 MiB are needed",
        "BGE_M3_WORKERS=2",
        "BGE_M3_MODEL=w8 or int8",
    ):
        assert figure in message
    enough = int(message.partition("give the process ")[2].split()[0])
    shares = attrs.evolve(shares, available_bytes=enough * MIB)
    assert require_useful(shares, "", COEFFICIENTS, 8192, is_8_bit=False)


def test_no_memory_at_all():
    """A group whose limit is zero is a way to say so."""
    with pytest.raises(ConfigError, match=r"0 MiB available \(cgroup_v2\)"):
        require_useful(budget(0, GIB), "cgroup_v2", COEFFICIENTS, 8192, is_8_bit=False)


@pytest.mark.parametrize(
    ("shares", "is_8_bit", "ways"),
    [
        (budget(1200 * MIB, 700 * MIB, 2), False, ["BGE_M3_WORKERS=1", "BGE_M3_MODEL=w8 or int8"]),
        (budget(1080 * MIB, 700 * MIB, 1), False, ["MEMORY_SAFETY_FACTOR", "BGE_M3_MODEL=w8"]),
        (budget(1080 * MIB, 700 * MIB, 2), True, ["BGE_M3_WORKERS=1, and", "MAX_SEQ_LENGTH"]),
        (budget(1080 * MIB, 700 * MIB, 1, 0.5), True, ["SAFETY_FACTOR", "MAX_SEQ_LENGTH"]),
        (budget(GIB, 2 * GIB, 4), False, ["BGE_M3_MODEL=w8", "BGE_M3_AVAILABLE_MEMORY_BYTES"]),
        (budget(GIB, 2 * GIB, 1), True, ["BGE_M3_AVAILABLE_MEMORY_BYTES", "other processes"]),
    ],
)
def test_three_ways_out_that_can_help(shares, is_8_bit, ways):
    """More memory always helps; what else is told depends on what is lacking."""
    with pytest.raises(ConfigError) as refusal:
        require_useful(shares, "host_ram", COEFFICIENTS, 8192, is_8_bit=is_8_bit)

    told = [line for line in str(refusal.value).splitlines() if line[:5].strip(" 123") == "."]
    assert [line[:4] for line in told] == ["  1.", "  2.", "  3."]
    for line, way in zip(told[1:], ways, strict=True):
        assert way in line
    plural = "s" if shares.workers > 1 else ""
    assert f"safety factor / {shares.workers} worker{plural}\n" in str(refusal.value)


def test_stated_memory_may_be_stated_too_low():
    """Whoever has said how much there is need not be told to say it."""
    with pytest.raises(ConfigError, match="leave BGE_M3_AVAILABLE_MEMORY_BYTES unset"):
        require_useful(budget(GIB, 2 * GIB), "override", COEFFICIENTS, 8192, is_8_bit=True)


@given(
    model_mib=st.integers(50, 3000),
    above_mib=st.integers(-200, 600),
    workers=st.integers(1, 4),
    safety=st.floats(0.1, 1.0),
)
def test_settings_that_are_a_way_out_are_one(model_mib, above_mib, workers, safety):
    """Whoever follows the advice on workers, share or length gets a server that starts."""
    available = max(1, model_mib + 256 + above_mib) * MIB
    shares = budget(available, model_mib * MIB, workers, safety)
    try:
        require_useful(shares, "host_ram", COEFFICIENTS, 8192, is_8_bit=True)
    except ConfigError as error:
        for line in str(error).splitlines():
            found = dict(re.findall(r"BGE_M3_([A-Z_]+)=([\d.]+)", line))
            advised = attrs.evolve(
                shares,
                workers=int(found.get("WORKERS", workers)),
                safety_factor=float(found.get("MEMORY_SAFETY_FACTOR", safety)),
            )
            if found:
                tokens = int(found.get("MAX_SEQ_LENGTH", 8192))
                require_useful(advised, "", COEFFICIENTS, tokens, is_8_bit=True)


def test_memory_for_short_texts_only():
    """A server that can do useful work starts, and knows how far it can go."""
    fitting = require_useful(
        budget(3 * GIB, 1231 * MIB), "cgroup_v1", COEFFICIENTS, 8192, is_8_bit=False
    )

    assert 512 < fitting < 8192
    assert require_useful(budget(2 * GIB, 1500 * MIB, 1), "", COEFFICIENTS, 64, is_8_bit=True) == 64


def test_a_text_that_does_not_fit_is_refused_by_place():
    """The caller learns which text, what it needs, what there is, and what would fit."""
    model = COEFFICIENTS.cost_model(600 * MIB)
    require_fits([10, 1000], model)
    with pytest.raises(RequestTooLargeError, match=r"input\[1\] has 8192 tokens") as refusal:
        require_fits([10, 8192, 8192], model)

    assert refusal.value.param == "input[1]"
    longest = int(str(refusal.value).rpartition("at most ")[2].split()[0])
    require_fits([longest], model)
    with pytest.raises(RequestTooLargeError):
        require_fits([longest + 1], model)


@given(ceiling=st.integers(0, 2**36), limit=st.integers(1, 8192))
def test_longest_text_is_the_edge(ceiling, limit):
    """One token more would not fit, or would be beyond the limit."""
    model = COEFFICIENTS.cost_model(ceiling)
    longest = longest_text(model, limit)

    assert longest == 0 or model.fits(1, longest)
    assert longest == limit or not model.fits(1, longest + 1)


@pytest.mark.parametrize(("tokens", "batch"), [(64, 256), (512, 204), (2048, 32), (8192, 3)])
def test_largest_batch(tokens, batch):
    """Batches of known budgets, cut at what a request may hold."""
    assert largest_batch(CostModel(16384.0, 8.0, 2 * GIB), tokens, 256) == batch

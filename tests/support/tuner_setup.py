"""A tuner with a fake store, and a fake model that needs a known amount of memory."""

import threading

import attrs
from bge_m3_server.app.tuning import Tuner
from bge_m3_server.app.tuning_state import Situation
from bge_m3_server.domain.budget import Budget
from bge_m3_server.domain.budget_override import Pins
from bge_m3_server.domain.probe_fit import Coefficients, Fit, FitQuality
from bge_m3_server.domain.testing import FakeBackend, FakeClock
from bge_m3_server.domain.types import MemoryLimit, ProbeKey, ResidentMemory

GIB = 1024**3
CONSERVATIVE = Coefficients(98_304.0, 192.0)
TRUE = Coefficients(80_000.0, 180.0)
REMEMBERED = Fit(Coefficients(90_000.0, 200.0), FitQuality(0.99, 0.05, 1.1, 8))
KEY = ProbeKey(
    server_version="1", model_id="bge-m3", model_fingerprint="f", precision="fp32", engine="ort",
    engine_version="1", intra_threads=1, max_tokens=8192, cpu_model="c", architecture="a",
)  # fmt: skip
BUDGET = Budget(available_bytes=64 * GIB, model_bytes=2 * GIB, workers=2, safety_factor=0.7)


@attrs.define
class FakeStore:
    """Coefficients in a dict."""

    kept: dict = attrs.field(factory=dict)
    problem: str | None = None

    def load(self, key):
        return self.kept.get(key, "there is nothing yet")

    def save(self, key, fit):
        if self.problem is None:
            self.kept[key] = fit
        return self.problem


@attrs.define
class FakeMemory:
    """A process whose peak is what its backend says."""

    risen: int = 0

    def resident(self):
        return ResidentMemory(2 * GIB, 0)

    def reset_peak(self):
        self.risen = 0

    def peak_bytes(self):
        return 2 * GIB + self.risen


@attrs.define
class CostlyBackend(FakeBackend):
    """A fake model that needs what `true` says.

    `hold` blocks passes of `hold_from` tokens or more.
    """

    memory: FakeMemory = attrs.field(factory=FakeMemory)
    true: Coefficients = TRUE
    hold: threading.Event | None = None
    hold_from: int = 64
    shapes: list = attrs.field(factory=list)
    releases_at_last_run: int = 0

    def run(self, batch, outputs):
        self.shapes.append(batch.ids.shape)
        self.releases_at_last_run = self.releases
        if self.hold is not None and batch.ids.shape[1] >= self.hold_from:
            assert self.hold.wait(30)
        if self.error is not None:
            raise self.error
        self.memory.risen = max(self.memory.risen, round(self.true.cost_bytes(*batch.ids.shape)))
        return {}


@attrs.define
class Setup:
    """A tuner, its surroundings, and what it published."""

    store: FakeStore = attrs.field(factory=FakeStore)
    backend: CostlyBackend = attrs.field(factory=CostlyBackend)
    published: list = attrs.field(factory=list)
    tuner: Tuner = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.tuner = Tuner(self.store, FakeClock())

    def situation(self, **changes):
        usual = {
            "memory": MemoryLimit(BUDGET.available_bytes, "cgroup_v2"),
            "budget": BUDGET,
            "pins": Pins(),
            "conservative": CONSERVATIVE,
            "max_tokens": 8192,
            "peaks": self.backend.memory,
            "trim": lambda: None,
            "key": KEY,
        }
        return Situation(**usual | changes)

    def prepare(self, **changes):
        return self.tuner.prepare(self.situation(**changes), self.backend)

    def start(self):
        self.tuner.start(lambda *news: self.published.append(news))

    def wait_for_probe(self):
        for thread in threading.enumerate():
            if thread.name == "probe":
                thread.join(30)
                assert not thread.is_alive()

    def close(self):
        """Stop the tuner; a pass that is held ends first."""
        if self.backend.hold is not None:
            self.backend.hold.set()
        self.tuner.stop()

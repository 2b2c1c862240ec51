"""Which memory figure counts."""

import attrs
from bge_m3_server.domain.budget import first_limit
from bge_m3_server.domain.types import MemoryLimit


@attrs.frozen
class FixedProbe:
    """A `MemoryProbe` that knows its answer."""

    answer: MemoryLimit | None

    def limit(self):
        return self.answer


def test_the_first_probe_with_an_answer_wins():
    """Silent probes are passed over, later ones are not asked to outbid."""
    inner, outer = MemoryLimit(1, "cgroup_v2"), MemoryLimit(2, "host_ram")

    assert first_limit([FixedProbe(None), FixedProbe(inner), FixedProbe(outer)]) is inner


def test_nobody_knows():
    """No answer is None, not a guess."""
    assert first_limit([]) is None
    assert first_limit([FixedProbe(None)]) is None

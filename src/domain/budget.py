"""How much memory the server may use."""

from collections.abc import Iterable

from .ports import MemoryProbe
from .types import MemoryLimit


def first_limit(probes: Iterable[MemoryProbe]) -> MemoryLimit | None:
    """The answer of the first probe that has one: probes go from the tightest source outward."""
    return next((limit for probe in probes if (limit := probe.limit()) is not None), None)

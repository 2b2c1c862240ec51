"""Measured coefficients, kept in one JSON file from one start to the next."""

import contextlib
import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ..domain.probe_fit import Coefficients, Fit, FitQuality, is_plausible
from ..domain.types import ProbeKey

FILE_NAME = "probe-coefficients.json"
SCHEMA_VERSION = 3

_READ_BYTES = 1 << 20
_LEAST_POINTS = 2
"""Of a fit with two coefficients."""

_MOST = 1 << 62
"""No count of bytes comes near it."""


@attrs.frozen
class JsonCoefficientStore:
    """A `CoefficientStore` in `directory`, which several servers may share.

    The file holds the fit of one key; another key's is foreign, and replaced by the next `save`.
    """

    directory: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / FILE_NAME

    def load(self, key: ProbeKey) -> Fit | str:
        """The fit of `key`, or why there is none that can be used."""
        try:
            record = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return f"there is no {self.path} yet"
        except (OSError, ValueError, RecursionError) as error:
            return f"{self.path} cannot be read: {error}"
        if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
            return f"{self.path} is not a record of schema version {SCHEMA_VERSION}"
        foreign = _differences(record.get("key"), attrs.asdict(key))
        if foreign:
            return f"{self.path} was measured under other conditions: {foreign}"
        return _fit(record) or f"{self.path} holds coefficients that no probe can have given"

    def save(self, key: ProbeKey, fit: Fit) -> str | None:
        """Keep `fit`; returns why that failed, None when it did not.

        Readers see the old file or the new one, never a part, also after a power failure. A fit
        that `load` would refuse takes the old one, which it proves wrong, with it.
        """
        record = {"schema_version": SCHEMA_VERSION, "key": attrs.asdict(key), **attrs.asdict(fit)}
        if _fit(record) is None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            return f"the next start would not believe them: {fit.coefficients}, {fit.quality}"
        temporary = self.path.with_name(f".{FILE_NAME}.{os.getpid()}.{uuid.uuid4().hex}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(record, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            return f"{self.path} cannot be written: {error}"
        finally:
            with contextlib.suppress(OSError):  # it took its place, or its directory is none
                temporary.unlink()
        return None


def model_fingerprint(graph_path: Path) -> str:
    """Hash of a graph file's size and of its first and last MiB.

    ONNX writes the operations, which decide the workspace, before the weights, which do not: the
    gigabytes between need not be read.
    """
    size_bytes = graph_path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    with graph_path.open("rb") as file:
        digest.update(file.read(_READ_BYTES))
        file.seek(max(0, size_bytes - _READ_BYTES))
        digest.update(file.read(_READ_BYTES))
    return digest.hexdigest()


def _differences(stored: object, wanted: Mapping[str, Any]) -> str:
    if not isinstance(stored, dict):
        return "it has no key"
    return ", ".join(
        f"{name} is {stored.get(name)!r} there and {value!r} here"
        for name, value in wanted.items()
        if stored.get(name) != value
    )


def _fit(record: Mapping[str, Any]) -> Fit | None:
    """The fit in a record; None unless every figure is of the kind it must be, and can be right."""
    try:
        coefficients = Coefficients(**record["coefficients"])
        quality = FitQuality(**record["quality"])
        limit = record["limited_to_bytes"]
    except (KeyError, TypeError):
        return None
    *figures, points = *attrs.astuple(coefficients), *attrs.astuple(quality)
    counts = [points] if limit is None else [points, limit]
    if not all(isinstance(figure, float) for figure in figures):
        return None
    if not all(type(count) is int and 0 < count < _MOST for count in counts):
        return None
    is_possible = (
        is_plausible(coefficients)
        and 0 <= quality.r_squared <= 1
        and 0 <= quality.worst_relative_error < math.inf
        and 0 < quality.margin < math.inf
        and points >= _LEAST_POINTS
    )
    return Fit(coefficients, quality, limit) if is_possible else None

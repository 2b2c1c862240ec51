"""What a run found, over all rounds; written to JSON after every visit, read by the renderer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from benchmarks.performance.machine import Machine
from benchmarks.performance.matrix_rate import MatrixRate
from benchmarks.performance.measure import Sample

SAME_OPTIONS = ("threads", "layers", "vocabulary", "quick")
"""What results must have in common to stand in one table."""


@attrs.frozen
class Cell:
    """One contender on one row: medians over the rounds; latencies over all calls.

    `loaded_bytes`: the least that was resident after the first short text; `peak_bytes`: the most
    while the row ran; `kept_bytes`: the most that was resident after it.
    """

    texts_per_second: float
    tokens_per_second: float
    p50_seconds: float
    p95_seconds: float
    loaded_bytes: int
    peak_bytes: int
    kept_bytes: int
    cosine: float | None
    rounds: int
    calls: int
    is_single: bool


@attrs.define
class Results:
    """All figures of a run.

    `samples`: contender → row → one per round. `missing`: contender → row → why it has no figure;
    `absent`: contender → why it has none at all. `versions`: environment → package → version.
    """

    machine: Machine
    options: Mapping[str, object]
    rows: Sequence[str]
    contenders: Sequence[str]
    samples: dict[str, dict[str, list[Sample]]] = attrs.field(factory=dict)
    missing: dict[str, dict[str, str]] = attrs.field(factory=dict)
    absent: dict[str, str] = attrs.field(factory=dict)
    versions: dict[str, Mapping[str, str]] = attrs.field(factory=dict)
    matrix_rates: list[MatrixRate] = attrs.field(factory=list)

    def add(self, contender: str, row: str, sample: Sample) -> None:
        """One round's."""
        self.samples.setdefault(contender, {}).setdefault(row, []).append(sample)

    def cell(self, contender: str, row: str) -> Cell | None:
        """Over all rounds; None where nothing was measured."""
        samples = self.samples.get(contender, {}).get(row)
        return cell_of(samples) if samples else None

    def added_to(
        self, earlier: "Results", rows: Sequence[str], contenders: Sequence[str]
    ) -> "Results":
        """`earlier`, with room for what this run measures; `rows` and `contenders` give the order.

        Raises:
            ValueError: `earlier` is of another machine, or of other work.
        """
        for name, ours, theirs in (
            ("machine", self.machine, earlier.machine),
            *((name, self.options[name], earlier.options[name]) for name in SAME_OPTIONS),
        ):
            if ours != theirs:
                raise ValueError(f"{name} is {ours}, and was {theirs}: measure without --add")
        return attrs.evolve(
            earlier,
            rows=[row for row in rows if row in {*earlier.rows, *self.rows}],
            contenders=[
                contender
                for contender in contenders
                if contender in {*earlier.contenders, *self.contenders}
            ],
            missing={
                contender: {
                    row: reason
                    for row, reason in reasons.items()
                    if contender not in self.contenders or row not in self.rows
                }
                for contender, reasons in earlier.missing.items()
            },
            absent={
                contender: reason
                for contender, reason in earlier.absent.items()
                if contender not in self.contenders
            },
        )

    def write(self, path: Path) -> None:
        """As JSON, beside its summary in cells."""
        content = attrs.asdict(self)
        content["cells"] = {
            contender: {row: attrs.asdict(cell_of(samples)) for row, samples in rows.items()}
            for contender, rows in self.samples.items()
        }
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def cell_of(samples: Sequence[Sample]) -> Cell:
    """Of at least one round."""
    calls = [seconds for sample in samples for seconds in sample.call_seconds]
    cosines = [sample.cosine for sample in samples if sample.cosine is not None]
    return Cell(
        texts_per_second=float(np.median([sample.texts_per_second for sample in samples])),
        tokens_per_second=float(np.median([sample.tokens_per_second for sample in samples])),
        p50_seconds=float(np.percentile(calls, 50)),
        p95_seconds=float(np.percentile(calls, 95)),
        loaded_bytes=min(sample.loaded_bytes for sample in samples),
        peak_bytes=max(sample.peak_bytes for sample in samples),
        kept_bytes=max(sample.kept_bytes for sample in samples),
        cosine=min(cosines, default=None),
        rounds=len(samples),
        calls=len(calls),
        is_single=any(sample.is_single for sample in samples),
    )


def read_results(path: Path) -> Results:
    """What `Results.write` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["cells"]
    machine = content["machine"]
    content["machine"] = Machine(**machine | {"flags": tuple(machine["flags"])})
    content["matrix_rates"] = [
        MatrixRate(**rate | {"shape": tuple(rate["shape"])}) for rate in content["matrix_rates"]
    ]
    content["samples"] = {
        contender: {
            row: [_read_sample(sample) for sample in samples] for row, samples in rows.items()
        }
        for contender, rows in content["samples"].items()
    }
    return Results(**content)


def _read_sample(sample: dict) -> Sample:
    return Sample(**sample | {"call_seconds": tuple(sample["call_seconds"])})

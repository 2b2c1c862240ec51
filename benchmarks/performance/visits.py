"""Rounds over the contenders: who takes part, one visit to one of them, what is not repeated."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import attrs
import numpy as np

from benchmarks.performance.contenders import REFERENCE, Contender
from benchmarks.performance.environments import (
    UnavailableError,
    ensure_environment,
    installed_versions,
)
from benchmarks.performance.measure import Effort, Task, Texts, measure, reference_texts
from benchmarks.performance.processes import GaveUpError, Place, Vectors, prepare, running
from benchmarks.performance.results import Results
from benchmarks.performance.workloads import TextMaker, Workload

WARM_UP_LENGTHS = (12,)
"""A mapped file counts as resident only once it was read: one pass reads all weights."""


@attrs.define
class Bench:
    """A run under way; `save` keeps what `results` holds so far."""

    results: Results
    rows: Sequence[Workload]
    maker: TextMaker
    directory: Path
    cache_dir: Path
    threads: int
    effort: Effort
    limit_seconds: float
    save: Callable[[], None]
    references: dict[str, Vectors] = attrs.field(factory=dict)

    def texts(self, row: Workload) -> Texts:
        """The texts of a row, variant by variant."""
        return partial(self._texts, row)

    def _texts(self, row: Workload, variant: int) -> list[str]:
        return self.maker.texts(row.name, variant, row.lengths)

    def embed_references(self) -> None:
        """Vectors of the fp32 graph, kept beside the checkpoint that they are of."""
        folder = self.directory / "references"
        folder.mkdir(exist_ok=True)
        missing = []
        for row in self.rows:
            texts = reference_texts(row, self.texts(row))
            digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
            path = folder / f"{digest}.npy"
            if path.is_file():
                self.references[row.name] = np.load(path)
            else:
                missing.append((row, texts, path))
        if not missing:
            return
        print(f"{REFERENCE.name} ...", flush=True)
        place = self._place(ensure_environment(REFERENCE.environment, self.cache_dir))
        with running(REFERENCE, place, limit_seconds=3600) as process:
            for row, texts, path in missing:
                _, vectors = process.embed(texts)
                np.save(path, vectors)
                self.references[row.name] = vectors

    def installed(self, contenders: Iterable[Contender]) -> dict[Contender, Place]:
        """Those whose environment is there and whose files could be made, and where they run."""
        places = {}
        for contender in contenders:
            try:
                python = ensure_environment(contender.environment, self.cache_dir)
                place = self._place(python)
                self.results.versions[contender.environment] = installed_versions(python)
                if contender.engine:
                    prepare(contender, place)
            except UnavailableError as error:
                self._leave_out(contender, error)
            else:
                places[contender] = place
        return places

    def visit(self, contender: Contender, place: Place) -> None:
        """All rows that are still worth a measurement, in as few processes as possible."""
        waiting = [row for row in self.rows if self._is_worth_it(contender, row)]
        while waiting and contender.name not in self.results.absent:
            try:
                with running(contender, place, self.limit_seconds) as process:
                    process.embed(self.maker.texts("warm-up", 0, WARM_UP_LENGTHS))
                    loaded_bytes = process.memory.resident_bytes()
                    while waiting:
                        row = waiting[0]
                        task = Task(row, self.texts(row), self.references[row.name])
                        sample = attrs.evolve(
                            measure(process, task, self.effort, http=contender.is_http),
                            loaded_bytes=loaded_bytes,
                        )
                        waiting.pop(0)
                        self.results.add(contender.name, row.name, sample)
                        print(f"  {row.name}: {sample.tokens_per_second:.0f} tokens/s", flush=True)
            except GaveUpError as error:  # the next row gets a new process
                row = waiting.pop(0)
                self.results.missing.setdefault(contender.name, {})[row.name] = str(error)
                print(f"  {row.name}: {error}", flush=True)
            except UnavailableError as error:
                self._leave_out(contender, error)
            self.save()

    def _is_worth_it(self, contender: Contender, row: Workload) -> bool:
        """Not what failed, and not again what took too long to be repeated at once."""
        if row.name in self.results.missing.get(contender.name, {}):
            return False
        samples = self.results.samples.get(contender.name, {}).get(row.name, [])
        return not any(sample.is_single for sample in samples)

    def _leave_out(self, contender: Contender, error: UnavailableError) -> None:
        self.results.absent[contender.name] = str(error)
        print(f"{contender.name}: {error}", flush=True)

    def _place(self, python: Path) -> Place:
        return Place(python, self.directory, self.cache_dir, self.threads)

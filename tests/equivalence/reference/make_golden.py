"""Copies a small part of the tiny checkpoint's numbers into ``tests/equivalence/golden``.

Run after ``make_all``, with its ``--out``::

    python -m tests.equivalence.reference.make_golden --out DIR
"""

import argparse
import json
import shutil
from pathlib import Path

from tests.equivalence.checkpoints import TINY
from tests.equivalence.numbers import Numbers
from tests.equivalence.reference.make_reference import MAX_TOKENS

GOLDEN = Path(__file__).parents[1] / "golden"

LONGEST_TOKENS = 130
"""Texts beyond it would make the check slow."""

COLBERT_EVERY = 5
"""ColBERT vectors of every fifth text: all of them would be most of a megabyte."""


def main() -> None:
    """Replace the golden files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="what make_all was given")
    made = parser.parse_args().out / TINY.name
    GOLDEN.mkdir(exist_ok=True)
    short_part(Numbers.load(made / f"reference_{MAX_TOKENS}.npz")).save(GOLDEN / "tiny.npz")
    scores = json.loads((made / "scores.json").read_text(encoding="utf-8"))
    (GOLDEN / "scores.json").write_text(json.dumps(scores) + "\n", encoding="utf-8")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        shutil.copyfile(made / name, GOLDEN / name)
    versions = json.loads((made / "made_with.json").read_text(encoding="utf-8"))["versions"]
    (GOLDEN / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")


def short_part(numbers: Numbers) -> Numbers:
    """The short texts, most of them without their ColBERT vectors."""
    short = [
        place
        for place, vectors in enumerate(numbers.colbert)
        if vectors is not None and len(vectors) < LONGEST_TOKENS
    ]
    return Numbers(
        texts=[numbers.texts[place] for place in short],
        dense=numbers.dense[short],
        sparse=[numbers.sparse[place] for place in short],
        colbert=[
            None if count % COLBERT_EVERY else numbers.colbert[place]
            for count, place in enumerate(short)
        ],
    )


if __name__ == "__main__":
    main()

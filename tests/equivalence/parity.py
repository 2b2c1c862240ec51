"""The parity table of docs/parity.md, and the floors that the tests hold it to.

python -m tests.equivalence.parity      (`make parity`)
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.equivalence.checkpoints import CHECKPOINTS
from tests.equivalence.compare import Agreement, agreement
from tests.equivalence.made import REPOSITORY, make_reference
from tests.equivalence.numbers import Numbers
from tests.equivalence.product import embed_all, embedder_of, load_directory
from tests.equivalence.texts import TEXTS

PAGE = REPOSITORY / "docs" / "parity.md"

PRECISIONS = ("fp32", "fp16", "int8")

FLOORS: Mapping[str, Mapping[str, Agreement]] = {
    "fp32": {
        "dense": Agreement(0.99999, 0.99999, 0.99999),
        "sparse": Agreement(0.99999, 0.99999, 0.99999),
        "colbert": Agreement(0.99999, 0.99999, 0.99999),
    },
    "fp16": {
        "dense": Agreement(0.9999, 0.99999, 0.9999),
        "sparse": Agreement(0.9999, 0.9999, 0.9999),
        "colbert": Agreement(0.9999, 0.9999, 0.9999),
    },
    "int8": {
        "dense": Agreement(0.99, 0.998, 0.995),
        "sparse": Agreement(0.93, 0.99, 0.97),
        "colbert": Agreement(0.99, 0.998, 0.995),
    },
}
"""Least cosine to FlagEmbedding in fp32, per precision and head."""

EVERY = 3
"""Every third text is enough for a statistic."""

Row = tuple[str, str, str, Agreement]


def sample(numbers: Numbers) -> Numbers:
    """The texts that precisions are compared on: a part, up to 1024 tokens long."""
    short = [place for place, text in enumerate(numbers.texts) if text in TEXTS]
    return numbers.part(short[::EVERY])


def table(rows: Sequence[Row]) -> str:
    """Markdown of `rows`: model, precision, head, agreement."""
    lines = ["| model | precision | head | min | mean | p5 |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {model} | {precision} | {head} "
        f"| {found.minimum:.6f} | {found.mean:.6f} | {found.p5:.6f} |"
        for model, precision, head, found in rows
    ]
    return "\n".join(lines)


def write_section(name: str, content: str) -> None:
    """Replace what stands between the page's ``<!-- name -->`` marks."""
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{PAGE} has no section {name}")
    PAGE.write_text(
        pattern.sub(lambda marks: f"{marks[1]}{content}\n{marks[2]}", page), encoding="utf-8"
    )


def checkpoint_rows(directory: Path) -> list[Row]:
    """Agreement of every checkpoint and precision with FlagEmbedding in fp32."""
    rows: list[Row] = []
    for checkpoint in CHECKPOINTS:
        numbers = sample(Numbers.load(directory / checkpoint.name / "reference_8192.npz"))
        for precision in PRECISIONS:
            model = load_directory(directory / checkpoint.name, BGE_M3_MODEL=precision)
            embeddings = embed_all(embedder_of(model), numbers.texts)
            rows += [
                (f"{checkpoint.name} ({checkpoint.hidden_size})", precision, head, found)
                for head, found in agreement(embeddings, numbers).items()
            ]
    return rows


if __name__ == "__main__":
    write_section("checkpoints", table(checkpoint_rows(make_reference())))

"""Checkpoints, their exports and FlagEmbedding's numbers, made once and kept.

Run from the repository root in the environment of ``requirements.txt``::

    python -m tests.equivalence.reference.make_all --out DIR --tokenizer tokenizer.json

Each checkpoint gets a directory of its own; what was made of the same scripts, versions and
tokenizer is left as it is.
"""

import argparse
import hashlib
import importlib.metadata
import json
import logging
import platform
import time
from pathlib import Path

from tests.equivalence.checkpoints import CHECKPOINTS, Checkpoint
from tests.equivalence.reference.make_checkpoints import write_checkpoint
from tests.equivalence.reference.make_exports import export
from tests.equivalence.reference.make_reference import write_reference

logger = logging.getLogger("make_all")

_REPOSITORY = Path(__file__).parents[3]
_SOURCES = (
    "tests/equivalence/checkpoints.py",
    "tests/equivalence/numbers.py",
    "tests/equivalence/texts.py",
    "tests/equivalence/reference/make_all.py",
    "tests/equivalence/reference/make_checkpoints.py",
    "tests/equivalence/reference/make_exports.py",
    "tests/equivalence/reference/make_reference.py",
    "tests/support/xlmr_onnx.py",
)
_PACKAGES = (
    "FlagEmbedding",
    "numpy",
    "onnx",
    "onnxruntime",
    "tokenizers",
    "torch",
    "transformers",
)


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument(
        "--only", choices=[checkpoint.name for checkpoint in CHECKPOINTS], action="append"
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    for checkpoint in CHECKPOINTS:
        if arguments.only is None or checkpoint.name in arguments.only:
            make(checkpoint, arguments.out / checkpoint.name, arguments.tokenizer)


def make(checkpoint: Checkpoint, directory: Path, tokenizer: Path) -> None:
    """Fill `directory` unless its ``made_with.json`` says that nothing has changed since."""
    record = directory / "made_with.json"
    made_with = json.dumps({"versions": versions(), "inputs": _digest(tokenizer)}, indent=2)
    if record.is_file() and record.read_text(encoding="utf-8") == made_with:
        logger.info("%s: kept as it is", directory)
        return
    record.unlink(missing_ok=True)
    for step, work in (
        ("checkpoint", lambda: write_checkpoint(checkpoint, directory, tokenizer)),
        ("exports", lambda: export(checkpoint, directory)),
        ("reference", lambda: write_reference(checkpoint, directory)),
    ):
        started = time.perf_counter()
        work()
        logger.info("%s: %s in %.1f s", directory, step, time.perf_counter() - started)
    record.write_text(made_with, encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions that the numbers depend on."""
    found = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **found}


def _digest(tokenizer: Path) -> str:
    digest = hashlib.sha256()
    for path in (*(_REPOSITORY / source for source in _SOURCES), tokenizer):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()

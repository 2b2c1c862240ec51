"""The directory of checkpoints, exports and reference numbers, made if need be."""

import os
import subprocess
from pathlib import Path

from tests.support.preview_fixture import preview_files

REPOSITORY = Path(__file__).parents[2]


def reference_python() -> Path:
    """The interpreter of FlagEmbedding's environment, which may not be there."""
    return REPOSITORY / os.environ.get("REFERENCE_VENV", ".venv-reference") / "bin" / "python"


def make_reference() -> Path:
    """Let FlagEmbedding's environment make what is missing; returns where it lies."""
    out = REPOSITORY / ".cache" / "equivalence"
    done = subprocess.run(
        [
            reference_python(), "-m", "tests.equivalence.reference.make_all",
            "--out", out, "--tokenizer", preview_files().tokenizer_path,
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the reference numbers could not be made:\n{done.stderr[-4000:]}")
    return out

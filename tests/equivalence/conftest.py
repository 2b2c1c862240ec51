"""Where the models and the reference numbers of the equivalence tests come from."""

import os
from pathlib import Path

import pytest

from tests.equivalence.checkpoints import TINY
from tests.equivalence.made import make_reference, reference_python
from tests.equivalence.numbers import Numbers
from tests.support.preview_fixture import preview_files
from tests.support.xlmr_onnx import LAYOUTS, write_xlmr

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def reference_dir():
    """Checkpoints, exports and FlagEmbedding's numbers, made by FlagEmbedding's environment."""
    python = reference_python()
    if not python.exists():
        reason = f"{python} is not there: `make test` builds FlagEmbedding's environment"
        if os.environ.get("REFERENCE_VENV"):
            pytest.fail(reason)
        pytest.skip(reason)
    return make_reference()


@pytest.fixture(scope="session")
def golden_models(tmp_path_factory):
    """The tiny checkpoint in both layouts, written without torch: layout → model directory."""
    directories = {}
    for layout in LAYOUTS:
        directory = tmp_path_factory.mktemp(layout)
        write_xlmr(TINY, directory / "onnx" / "model.onnx", layout)
        (directory / "tokenizer.json").symlink_to(preview_files().tokenizer_path)
        for name in ("sparse_linear.pt", "colbert_linear.pt"):
            (directory / name).symlink_to(GOLDEN / name)
        directories[layout] = directory
    return directories


@pytest.fixture(scope="session")
def golden_numbers():
    """What FlagEmbedding returned for the tiny checkpoint."""
    return Numbers.load(GOLDEN / "tiny.npz")

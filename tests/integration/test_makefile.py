"""What `make` would do."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("goals", [["lint", "test"], ["bench", "lint", "parity", "test"]])
def test_nothing_else_is_installed_while_goals_are_made(goals, tmp_path):
    """Goals that are made at once share one installation, which ends before any of them begins."""
    done = subprocess.run(
        ["make", "--dry-run", "--jobs=4", f"VENV={tmp_path}/venv", *goals],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.count(f"{tmp_path}/venv/bin/pip install --quiet --editable") == 1

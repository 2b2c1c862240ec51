"""Fixtures of the suites that prepare models: their source."""

import shutil

import pytest

from tests.support.preparable import write_preparable


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A source that no test changes."""
    path = tmp_path_factory.mktemp("source")
    write_preparable(path)
    return path


@pytest.fixture
def directory(original, tmp_path):
    """A source that a test may change."""
    return shutil.copytree(original, tmp_path / "source")

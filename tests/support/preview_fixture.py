"""The preview model, built once and kept between test runs."""

import functools
import os
from pathlib import Path

from bge_m3_server.adapters.models.files import ModelFiles
from bge_m3_server.adapters.models.preview import build_preview

_REPOSITORY = Path(__file__).parents[2]


def preview_cache_dir() -> Path:
    """`BGE_M3_TEST_CACHE`, or a folder in the checkout that git ignores."""
    given = os.environ.get("BGE_M3_TEST_CACHE")
    return Path(given) if given else _REPOSITORY / ".cache" / "preview-tests"


@functools.cache
def preview_files() -> ModelFiles:
    """The built model's files."""
    return build_preview(preview_cache_dir())

"""The `openvino` package, which is an extra."""

import importlib
import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...domain.errors import ProviderError

PACKAGE = "openvino"


def is_installed(find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> bool:
    """Whether the package is there; it is not imported, which takes a quarter of a second.

    A folder that an uninstall has left behind is none: it has no file of its own to import.
    """
    return getattr(find(PACKAGE), "origin", None) is not None


def import_openvino(importer: Callable[[str], ModuleType] = importlib.import_module) -> Any:  # noqa: ANN401  (the package has no types)
    """The package.

    Raises:
        ProviderError: it is not installed, or its libraries do not load.
    """
    try:
        package = importer(PACKAGE)
        _ = package.Core
    except Exception as error:  # its libraries raise what they like
        raise ProviderError(
            f"OpenVINO was asked for and cannot be imported ({error}): "
            "run `pip install 'bge-m3-server[openvino]'`, or choose another engine"
        ) from error
    return package


def engine_version() -> str:
    """What OpenVINO calls itself, with its build.

    Raises:
        ProviderError: the package cannot be imported.
    """
    return str(import_openvino().__version__)


def reason(error: Exception) -> str:
    """What the engine says went wrong, on one line instead of several."""
    return " ".join(str(error).split())

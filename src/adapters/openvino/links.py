"""A hub cache is made of links, and OpenVINO follows none that leads out of a model's directory."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...domain.errors import EngineError
from ..models.onnx_file import inspect_graph


@contextlib.contextmanager
def without_links(graph_path: Path) -> Iterator[Path]:
    """The same model under names that are no symbolic links; gone when the block ends.

    Hard links next to the real files, so nothing is copied.

    Raises:
        EngineError: they cannot be made.
    """
    external = {reference.location for reference in inspect_graph(graph_path).external}
    names = [graph_path.name, *sorted(external)]
    if not any((graph_path.parent / name).is_symlink() for name in names):
        yield graph_path
        return
    home = graph_path.resolve().parent
    with contextlib.ExitStack() as stack:
        try:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=".openvino-", dir=home))
            )
            for name in names:
                link = directory / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.hardlink_to((graph_path.parent / name).resolve())
        except OSError as error:
            raise EngineError(
                f"OpenVINO cannot read a model through links, and other names for its files cannot "
                f"be made in {home} ({error}): make that directory writable, or use "
                "`bge-m3-server fetch --dir` and BGE_M3_MODEL_DIR"
            ) from error
        yield directory / graph_path.name

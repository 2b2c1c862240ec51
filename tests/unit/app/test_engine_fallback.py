"""An engine that was chosen by rule, and cannot be used on this machine."""

import subprocess
import sys

import pytest

from tests.support.server_process import clean_environment
from tests.support.tiny_models import write_tiny_model

LOAD = """
import sys
import attrs
from bge_m3_server.app.config import ExecutionProvider, load_config
from bge_m3_server.app.container import build_container

config = load_config({"BGE_M3_MODEL_DIR": sys.argv[1], "BGE_M3_CACHE_DIR": sys.argv[2],
                      "BGE_M3_MODEL": "fp32", "BGE_M3_DISABLE_AUTO_BUDGET": "1"}, "linux")
config = attrs.evolve(config, execution_provider=ExecutionProvider.OPENVINO,
                      execution_provider_reason=sys.argv[3])
print(build_container(config).load_model().info.dimensions)
"""


@pytest.fixture
def load(tmp_path):
    """Load a tiny model where the `openvino` package is there, but its libraries are not."""
    write_tiny_model(tmp_path / "model")
    package = tmp_path / "packages" / "openvino"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libtbb.so.12 is missing')\n")

    def run(reason):
        return subprocess.run(
            [sys.executable, "-c", LOAD, tmp_path / "model", tmp_path / "cache", reason],
            env=clean_environment(PYTHONPATH=str(package.parent)),
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_it_gives_way_to_onnx_runtime_with_a_warning(load):
    """Nobody asked for it by name, so the server starts without it."""
    done = load("auto: the processor has everything")

    assert done.stdout == "16\n", done.stderr
    assert "the engine that was chosen does not run here, ONNX Runtime does" in done.stderr
    assert "libtbb.so.12 is missing" in done.stderr


def test_one_that_was_named_stops_the_start(load):
    """Whoever asks for an engine gets that one or an error."""
    done = load("BGE_M3_EP, or the default of this system")

    assert done.returncode == 1
    assert "ProviderError: OpenVINO was asked for and cannot be imported" in done.stderr

"""An engine that was chosen by rule, and cannot be used on this machine."""

import subprocess
import sys

import attrs
import pytest
from bge_m3_server.adapters.openvino.backend import OpenVinoBackend
from bge_m3_server.adapters.ort.session import OrtBackend
from bge_m3_server.app.config import ExecutionProvider, load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.domain import self_test
from bge_m3_server.domain.embedder import Embedder
from bge_m3_server.domain.errors import InferenceError, SelfTestError

from tests.support.openvino_mark import needs_openvino
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


BY_RULE = "auto: the processor has everything"


@pytest.fixture
def tested(monkeypatch):
    """The kinds of backend that self-tests were run on, in order."""
    kinds = []

    class Recording(Embedder):
        def __init__(self, tokenizer, backend, *rest):
            kinds.append(type(backend))
            super().__init__(tokenizer, backend, *rest)

    monkeypatch.setattr(self_test, "Embedder", Recording)
    return kinds


@pytest.fixture
def serving(tmp_path):
    """The engine of a server on OpenVINO, chosen for this reason, over a tiny model."""
    write_tiny_model(tmp_path / "model")
    environment = {
        "BGE_M3_MODEL_DIR": str(tmp_path / "model"),
        "BGE_M3_CACHE_DIR": str(tmp_path / "cache"),
        "BGE_M3_MODEL": "fp32",
        "BGE_M3_DISABLE_AUTO_BUDGET": "1",
    }

    def engine(reason):
        config = attrs.evolve(
            load_config(environment, "linux"),
            execution_provider=ExecutionProvider.OPENVINO,
            execution_provider_reason=reason,
        )
        return build_container(config).engine()

    return engine


@needs_openvino
@pytest.mark.parametrize("reason", [BY_RULE, "BGE_M3_EP"])
def test_a_loaded_model_is_tested_once(serving, tested, reason):
    """However the engine was chosen, its start costs one self-test."""
    engine = serving(reason)
    engine.load()
    engine.stop()

    assert tested == [OpenVinoBackend]


@pytest.fixture
def fails_on_openvino(monkeypatch):
    """OpenVINO loads every model, and fails at running it."""

    def run(self, batch, outputs):
        raise InferenceError("no kernel for this processor")

    monkeypatch.setattr(OpenVinoBackend, "run", run)


@needs_openvino
@pytest.mark.usefixtures("fails_on_openvino")
def test_an_engine_that_fails_its_self_test_gives_way_too(serving, tested, caplog):
    """ONNX Runtime serves, and is tested in its turn."""
    engine = serving(BY_RULE)
    engine.load()
    is_ready = engine.status().ready
    engine.stop()

    assert is_ready
    assert tested == [OpenVinoBackend, OrtBackend]
    assert "ONNX Runtime does: the model failed its self-test: no kernel" in caplog.text


@needs_openvino
@pytest.mark.usefixtures("fails_on_openvino")
def test_one_that_was_named_and_fails_its_self_test_stops_the_start(serving, tested):
    """It is not replaced."""
    with pytest.raises(SelfTestError, match="no kernel"):
        serving("BGE_M3_EP").load()

    assert tested == [OpenVinoBackend]

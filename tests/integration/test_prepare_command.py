"""Fetching and preparing from the command line, and starts without room for a prepared model."""

import json
import platform

import attrs
import onnxruntime
import pytest
from bge_m3_server.adapters.models.files import read_record, write_record
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container, preparation
from bge_m3_server.domain.errors import CacheDirectoryError
from bge_m3_server.domain.types import Heads

from benchmarks.synthetic_bge_m3 import Shape, write_synthetic_bge_m3
from tests.support.openvino_mark import needs_openvino
from tests.support.preparable import TOO_COARSE, write_preparable
from tests.support.server_process import run_cli, run_python
from tests.support.tiny_models import write_tiny_model


def settings(tmp_path, **variables):
    if "BGE_M3_MODEL_DIR" not in variables:
        write_tiny_model(tmp_path / "model")
    return {
        "BGE_M3_MODEL_DIR": str(tmp_path / "model"),
        "BGE_M3_CACHE_DIR": str(tmp_path / "cache"),
        "BGE_M3_EP": "cpu",
        "BGE_M3_DISABLE_AUTO_BUDGET": "1",
        **variables,
    }


@pytest.mark.parametrize("variant", ["auto", "w8"])
def test_fetching_a_prepared_variant_fetches_its_source(tmp_path, variant):
    """They are built here, from the published fp32 files."""
    done = run_cli(
        "fetch", "--variant", variant, HF_HUB_OFFLINE="1", BGE_M3_CACHE_DIR=str(tmp_path)
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert "BAAI/bge-m3" in done.stderr
    assert "onnx/model.onnx" in done.stderr
    assert "Traceback" not in done.stderr


def test_prepare_leaves_a_model_and_its_verdict(tmp_path):
    """The command names the directory; there lies what was found when it was compared."""
    done = run_cli("prepare", **settings(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "bge-m3 (w8) is prepared and verified" in done.stdout
    (verdict,) = (tmp_path / "cache" / "prepared").glob("*-cpu-recipe*/fidelity.json")
    assert str(verdict.parent) in done.stdout
    found = json.loads(verdict.read_text())
    assert found["refused"] == ""
    assert found["environment"].startswith(f"{onnxruntime.__version__} {platform.machine()}")


@pytest.mark.parametrize("engine", ["cpu", pytest.param("openvino", marks=needs_openvino)])
def test_memory_while_preparing_is_bounded(tmp_path, engine):
    """At its peak the process has 2.5 times the bytes of the source, interpreter included."""
    graph = write_synthetic_bge_m3(tmp_path / "model", Shape(layers=8))
    source_bytes = sum(path.stat().st_size for path in graph.parent.iterdir())
    directory = str(tmp_path / "model")
    script = (
        "import sys\n"
        "from bge_m3_server.adapters.memory.peak import peak_memory\n"
        "from bge_m3_server.app.cli import main\n"
        "memory = peak_memory()\n"
        "if isinstance(memory, str): sys.exit(memory)\n"
        "main(['prepare']) == 0 or sys.exit('not prepared')\n"
        "print('peak', memory.peak_bytes())\n"
    )
    printed = run_python(script, **settings(tmp_path, BGE_M3_EP=engine, BGE_M3_MODEL_DIR=directory))

    assert "is prepared and verified" in printed
    assert int(printed.split()[-1]) <= 2.5 * source_bytes


def test_preparing_leaves_nothing_of_itself_in_memory(tmp_path):
    """A first start holds what a later one does; less than the weights come on top."""
    shape = Shape(layers=2, vocabulary=64)
    write_synthetic_bge_m3(tmp_path / "model", shape)
    weights_bytes = shape.layers * 12 * shape.hidden**2 * 4
    source = settings(tmp_path, BGE_M3_MODEL="w8", BGE_M3_MODEL_DIR=str(tmp_path / "model"))
    script = (
        "import os, sys\n"
        "from bge_m3_server.adapters.memory.rss import resident_bytes\n"
        "from bge_m3_server.app.config import load_config\n"
        "from bge_m3_server.app.container import build_container\n"
        "model = build_container(load_config(os.environ, sys.platform)).load_model()\n"
        "print(resident_bytes())\n"
    )
    first, second = (int(run_python(script, **source)) for _ in range(2))

    assert first - second < weights_bytes


@pytest.mark.parametrize("model", ["fp32", "preview"])
def test_there_is_nothing_to_prepare_for_a_model_that_is_served_as_it_is(model):
    """The command says so instead of doing nothing."""
    done = run_cli("prepare", BGE_M3_MODEL=model)

    assert done.returncode == 2
    assert f"BGE_M3_MODEL={model} is served as it is" in done.stderr


@pytest.mark.parametrize("engine", ["cuda", "tensorrt", "coreml"])
def test_there_is_nothing_to_prepare_for_an_engine_that_is_none_of_a_cpu(engine):
    """The command names the engine and the ways out, and neither downloads nor loads anything."""
    done = run_cli("prepare", BGE_M3_EP=engine)

    assert (done.returncode, done.stdout) == (2, "")
    assert f"BGE_M3_EP={engine} serves models as they are" in done.stderr
    assert "cpu or openvino" in done.stderr


@pytest.fixture
def multiplies_int8(monkeypatch):
    """A processor on which 8-bit weights are the default."""
    monkeypatch.setattr(preparation, "read_cpu_flags", lambda: frozenset({"avx512_vnni"}))


@pytest.mark.usefixtures("multiplies_int8")
def test_a_refused_model_is_served_as_it_is(tmp_path, caplog):
    """Nobody asked for 8 bits: fp32 is served, and a warning has the figures."""
    config = load_config(settings(tmp_path), "linux")
    write_preparable(tmp_path / "model", gain=TOO_COARSE)

    model = build_container(config).load_model()

    assert model.backends[0].contract.precision == "fp32"
    (warning,) = (each for each in caplog.records if "served as it is" in each.getMessage())
    assert warning.levelname == "WARNING"
    assert "sparse weight correlation is 0." in warning.getMessage()


@pytest.mark.usefixtures("multiplies_int8")
def test_a_cache_that_cannot_be_written_costs_speed_only(tmp_path, caplog):
    """By default a model without room for its 8-bit form is served as it is, with a warning."""
    (tmp_path / "cache").write_text("a file is in the way")

    model = build_container(load_config(settings(tmp_path), "linux")).load_model()

    assert model.backends[0].contract.precision == "fp32"
    assert f"cannot be prepared in {tmp_path / 'cache'}" in caplog.text


def test_a_cache_that_cannot_be_written_stops_who_asked_for_8_bits(tmp_path):
    """The message names the directory, the room and the variable."""
    (tmp_path / "cache").write_text("a file is in the way")
    config = load_config(settings(tmp_path, BGE_M3_MODEL="w8"), "linux")

    with pytest.raises(CacheDirectoryError, match=r"cache.*3 GB free.*BGE_M3_CACHE_DIR"):
        build_container(config).load_model()


def test_heads_that_are_in_the_graph_are_not_read_again(tmp_path):
    """A start with the prepared form does without what is in the separate head weights."""
    config = load_config(settings(tmp_path, BGE_M3_MODEL="w8"), "linux")
    write_preparable(tmp_path / "model")
    build_container(config).prepare()
    known = tmp_path / "cache" / "prepared"
    records = read_record(known)
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        path = tmp_path / "model" / name
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        record = attrs.evolve(records[str(path)], mtime_ns=path.stat().st_mtime_ns)
        records[str(path)] = attrs.evolve(record, ctime_ns=path.stat().st_ctime_ns)
    write_record(known, records)  # known, so not hashed again

    model = build_container(config).load_model()

    assert model.info.heads == Heads.DENSE | Heads.SPARSE | Heads.COLBERT

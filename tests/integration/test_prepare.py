"""The prepared model from the command line to the answer, and what happens where it cannot be."""

import json

import httpx
import numpy as np
import pytest
from bge_m3_server.adapters.processor import may_multiply_int8, read_cpu_flags

from tests.support.openvino_mark import needs_openvino
from tests.support.preparable import TOO_COARSE, write_preparable
from tests.support.server_process import READY_LINE, post, run_cli, running_server
from tests.support.tiny_models import write_tiny_model

TEXTS = ["hello world", "what is it?", "the a w1 w2 w3 w4 w5 w6 w7 w8 w9 " * 4]
REFUSED = "sparse weight correlation is 0."


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_preparable(path)
    return path


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """A model that 8 bits are too few for."""
    path = tmp_path_factory.mktemp("coarse")
    write_preparable(path, gain=TOO_COARSE)
    return path


def settings(directory, cache, **variables):
    return {
        "BGE_M3_MODEL_DIR": str(directory),
        "BGE_M3_CACHE_DIR": str(cache),
        "BGE_M3_LOG_FORMAT": "json",
        "BGE_M3_EP": "cpu",
        **variables,
    }


def answers(server):
    response = post(server, "/v1/embeddings", {"model": "bge-m3", "input": TEXTS})
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


def lowest_cosine(left, right):
    return float((left * right).sum(axis=1).min())


def lines(server, text):
    return [line for line in server.log if text in line]


@pytest.fixture(scope="module")
def exact(directory, tmp_path_factory):
    """Answers of the source in full precision."""
    cache = tmp_path_factory.mktemp("exact")
    with running_server(settings(directory, cache, BGE_M3_MODEL="fp32")) as server:
        vectors = answers(server)
        assert not lines(server, "preparing the model")
    assert not (cache / "prepared").exists()
    return vectors


@pytest.mark.parametrize("engine", ["cpu", pytest.param("openvino", marks=needs_openvino)])
def test_the_first_start_prepares_and_the_second_does_not(directory, exact, tmp_path, engine):
    """Both starts answer as fp32 does, with other numbers than it."""
    environment = settings(directory, tmp_path, BGE_M3_EP=engine, BGE_M3_MODEL="w8")
    with running_server(environment) as server:
        assert lines(server, "preparing the model")
        first = answers(server)
    with running_server(environment) as server:
        assert not lines(server, "preparing the model")
        second = answers(server)

    assert lowest_cosine(first, exact) >= 0.9995
    assert not np.array_equal(first, exact)
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_prepare_leaves_nothing_to_do_for_serve(directory, exact, tmp_path):
    """The command prints where the model lies, and the server that starts then takes it."""
    environment = settings(directory, tmp_path)
    done = run_cli("prepare", **environment)
    assert done.returncode == 0, done.stderr
    assert "is prepared and verified" in done.stdout
    assert str(tmp_path / "prepared") in done.stdout

    with running_server({**environment, "BGE_M3_MODEL": "w8"}) as server:
        assert not lines(server, "preparing the model")
        assert lowest_cosine(answers(server), exact) >= 0.9995


def test_a_refused_model_is_not_served_as_w8(coarse, tmp_path):
    """Who asks for 8 bits gets them or the reason, from the server as from the command."""
    environment = settings(coarse, tmp_path, BGE_M3_MODEL="w8")
    with running_server(environment, wait_until_ready=False) as server:
        assert server.process.wait(timeout=60) != 0
        assert not lines(server, READY_LINE)
        assert lines(server, REFUSED)
    done = run_cli("prepare", **settings(coarse, tmp_path))
    assert done.returncode == 1
    assert REFUSED in done.stderr
    assert "BGE_M3_MODEL=fp32" in done.stderr


@pytest.mark.parametrize("engine", ["cpu", pytest.param("openvino", marks=needs_openvino)])
def test_what_is_faster_on_this_processor_is_the_default(directory, tmp_path, engine):
    """8 bits where they are multiplied at once; elsewhere fp32, and w8 with a warning."""
    is_faster = may_multiply_int8(read_cpu_flags())
    environment = settings(directory, tmp_path, BGE_M3_EP=engine)
    with running_server(environment) as server:
        assert bool(lines(server, "preparing the model")) is is_faster
        assert bool(lines(server, "fp32 is served, for this processor")) is not is_faster
    with running_server(environment | {"BGE_M3_MODEL": "w8"}) as server:
        warnings = lines(server, "has no instructions for 8-bit products: w8")
        assert bool(warnings) is not is_faster


def test_a_source_that_computes_nonsense_is_told_in_one_line(tmp_path):
    """Neither `prepare` nor the server ends with a traceback."""
    graph = write_preparable(tmp_path / "model")
    data = graph.with_name(f"{graph.name}_data")
    data.write_bytes(b"\xff" * data.stat().st_size)  # NaN, all of it
    environment = settings(tmp_path / "model", tmp_path / "cache")

    done = run_cli("prepare", **environment)

    assert done.returncode == 1
    assert "its source gives no numbers" in done.stderr
    assert "Traceback" not in done.stderr
    with running_server(environment, wait_until_ready=False) as server:
        assert server.process.wait(timeout=60) != 0
        assert lines(server, "start failed")
        assert not lines(server, "Traceback")


def test_fp16_on_a_cpu_is_served_with_a_warning(tmp_path):
    """The warning names the factor."""
    write_tiny_model(tmp_path / "half", precision="fp16")
    environment = settings(tmp_path / "half", tmp_path / "cache", BGE_M3_MODEL="fp16")
    with running_server(environment) as server:
        assert json.loads(server.wait_for_log("6 to 9 times slower"))["level"] == "WARN"
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200


@needs_openvino
def test_an_engine_chosen_by_rule_serves_on_a_lesser_processor(directory, exact, tmp_path):
    """With the instructions masked that it needs, OpenVINO is not chosen."""
    environment = settings(directory, tmp_path, BGE_M3_EP="auto", ONEDNN_MAX_CPU_ISA="SSE41")
    with running_server(environment) as server:
        assert lowest_cosine(answers(server), exact) >= 0.9995
        started = json.loads(server.wait_for_log("Starting bge-m3-server"))
    assert started["fields"]["execution_provider"] == "cpu"


@needs_openvino
def test_an_engine_that_was_named_serves_on_a_lesser_processor(directory, exact, tmp_path):
    """Slower, but right."""
    environment = settings(directory, tmp_path, BGE_M3_EP="openvino", ONEDNN_MAX_CPU_ISA="AVX2")
    with running_server(environment) as server:
        assert lowest_cosine(answers(server), exact) >= 0.9995

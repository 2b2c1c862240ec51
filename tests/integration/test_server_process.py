"""The real server: a process, a socket, the preview model, the clients that people use."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.support.preview_fixture import preview_cache_dir
from tests.support.server_process import clean_environment, post, run_cli, running_server

TEXTS = ["The cat sits on the mat.", "机器学习与深度学习有什么差别?", "", "🙂‍↔️ नमस्ते"]


@pytest.fixture(scope="module")
def preview():
    """Settings of a server with the preview model."""
    return {
        "BGE_M3_MODEL": "preview",
        "BGE_M3_CACHE_DIR": str(preview_cache_dir()),
        "BGE_M3_LOG_FORMAT": "json",
    }


@pytest.fixture(scope="module")
def server(preview):
    """One server for all questions that do not end it."""
    with running_server({**preview, "BGE_M3_WORKERS": "2"}) as running:
        yield running


def sdk(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_the_openai_sdk_gets_vectors_by_its_default_base64_path(server):
    """The SDK asks for base64 by itself and decodes unit vectors in input order."""
    answer = sdk(server).embeddings.create(model="anything", input=TEXTS)

    vectors = np.array([item.embedding for item in answer.data], dtype=np.float32)
    assert vectors.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2 * len(TEXTS)


def test_base64_and_float_answers_hold_the_same_numbers(server):
    """Both encodings carry exactly the same float32 values."""
    by_default = sdk(server).embeddings.create(model="m", input=TEXTS)
    as_floats = sdk(server).embeddings.create(model="m", input=TEXTS, encoding_format="float")

    for left, right in zip(by_default.data, as_floats.data, strict=True):
        np.testing.assert_array_equal(np.float32(left.embedding), np.float32(right.embedding))


def test_langchain_embeds_documents_and_queries(server):
    """LangChain works with its context-length check off, as the error message advises."""
    embeddings = OpenAIEmbeddings(
        model="bge-m3",
        base_url=f"{server.url}/v1",
        api_key="unused",
        check_embedding_ctx_length=False,
    )

    documents = embeddings.embed_documents(TEXTS)

    assert [len(vector) for vector in documents] == [384] * len(TEXTS)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), documents[0], atol=1e-5)


def test_token_ids_are_refused_with_the_way_out(server):
    """Ids of another tokenizer would give wrong vectors, so the message names the switch."""
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        sdk(server).embeddings.create(model="m", input=[[791, 8415, 13]])


def test_both_heads_equal_their_own_routes(server):
    """One pass for both gives what the two routes give."""
    both = post(server, "/v1/embeddings:both", {"input": TEXTS}).json()["data"]
    dense = post(server, "/v1/embeddings", {"input": TEXTS}).json()["data"]
    sparse = post(server, "/v1/sparse-embeddings", {"input": TEXTS}).json()["data"]

    for one, two, three in zip(both, dense, sparse, strict=True):
        np.testing.assert_allclose(one["embedding"], two["embedding"], atol=1e-5)
        assert one["sparse_values"] == three["sparse_values"]
    assert both[2]["sparse_values"] == {"indices": [], "values": []}


def test_a_vector_does_not_depend_on_its_neighbours(server):
    """A text gives the same vector alone and in a batch."""
    together = post(server, "/v1/embeddings", {"input": TEXTS}).json()["data"]

    for text, item in zip(TEXTS, together, strict=True):
        (alone,) = post(server, "/v1/embeddings", {"input": text}).json()["data"]
        np.testing.assert_allclose(alone["embedding"], item["embedding"], atol=1e-5)


def test_over_long_input_is_cut_and_reported(server):
    """The answer names the texts that were cut to the model's limit."""
    answer = post(server, "/v1/embeddings", {"input": ["short", "word " * 2000]})

    assert answer.headers["x-truncated-inputs"] == "1"
    assert answer.json()["usage"]["prompt_tokens"] == 3 + 512
    assert "x-truncated-inputs" not in post(server, "/v1/embeddings", {"input": "short"}).headers


def test_the_preview_never_passes_for_bge_m3(server):
    """Models, health and log all say what is being served, and how to get the real one."""
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    health = httpx.get(f"{server.url}/health").json()
    answer = post(server, "/v1/embeddings", {"input": "a", "model": "bge-m3"}).json()

    assert model["id"] == answer["model"] == "preview-multilingual-e5-small"
    for notice in (json.dumps(model), json.dumps(health), "".join(server.log)):
        assert "not BGE-M3" in notice


def test_health_reports_workers_and_tuning(server):
    """A healthy server gives the whole body; what nobody measured is null."""
    health = httpx.get(f"{server.url}/health").json()

    assert health["status"] == "ok"
    assert health["workers"] == {"live": 2, "total": 2, "busy": 0, "suspect": 0, "replaced": 0}
    assert health["queue"]["waiting_tokens"] == 0
    assert health["max_seq_length"] == 512
    assert health["tuning"]["probe_status"] == "disabled"
    assert health["tuning"]["available_bytes"] > 0
    assert health["tuning"]["model_rss_bytes_per_worker"] > 10**8
    assert health["tuning"]["fit_r_squared"] is None


def test_each_request_leaves_one_completion_line(server):
    """The log line carries the stage timings and the caller's id."""
    post(server, "/v1/embeddings", {"input": "logged"}, headers={"x-request-id": "find-me"})

    line = json.loads(server.wait_for_log("find-me"))
    assert (line["bge_module"], line["build"], line["level"]) == ("server", "cpu", "INFO")
    fields = line["fields"]
    assert fields["message"] == "embedding request complete"
    assert fields["route"] == "dense"
    assert {"tokenize_ms", "queue_wait_ms", "inference_ms", "total_ms"} <= fields.keys()


def test_traces_show_each_request_with_its_chunks(preview):
    """With an exporter named, one span per request and one per forward pass below it."""
    with running_server({**preview, "OTEL_TRACES_EXPORTER": "console"}) as server:
        post(server, "/v1/embeddings", {"input": ["short", "a longer text of several words"]})
        server.wait_for_log('"kind": "SpanKind.SERVER"')
        spans = [json.loads(line) for line in server.log if line.startswith('{"name"')]

    (request,) = (span for span in spans if span["kind"] == "SpanKind.SERVER")
    chunks = [span for span in spans if span["name"] == "chunk"]
    assert chunks
    for chunk in chunks:
        assert chunk["parent_id"] == request["context"]["span_id"]
        assert {"batch", "max_tokens", "padding_ratio", "estimated_bytes", "inference_ms"} <= set(
            chunk["attributes"]
        )


def test_sigterm_ends_the_server_with_exit_code_0(preview):
    """A stop that was asked for is a success."""
    with running_server(preview) as server:
        assert server.stop() == 0


def test_work_in_flight_is_finished_before_the_server_stops(preview):
    """A request that was accepted before SIGTERM gets its answer."""
    with running_server({**preview, "BGE_M3_WORKERS": "1"}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"input": ["many words " * 200] * 16}).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nx-request-id: in-flight\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            connection.settimeout(60)
            # The health answer shows that the loop has taken the request in before the signal.
            httpx.get(f"{server.url}/health")
            server.process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert server.process.wait(timeout=60) == 0


def test_a_bad_configuration_exits_with_2_and_names_everything():
    """All invalid values come in one message."""
    done = run_cli("serve", BGE_M3_WORKERS="two", BGE_M3_EP="gpu")

    assert done.returncode == 2
    assert "BGE_M3_WORKERS='two'" in done.stderr
    assert "BGE_M3_EP='gpu'" in done.stderr


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "coreml"])
def test_a_missing_execution_provider_stops_the_start(tmp_path, provider):
    """A provider that is not there never becomes a silent CPU run, nor a download in vain."""
    done = run_cli(
        "serve",
        BGE_M3_EP=provider,
        BGE_M3_CACHE_DIR=str(tmp_path),
        BGE_M3_BIND="127.0.0.1:0",
        HF_ENDPOINT="http://127.0.0.1:9",
    )

    assert done.returncode == 1
    assert "CPUExecutionProvider" in done.stdout
    assert provider in done.stdout.lower()


def test_an_impossible_cache_directory_stops_the_start_at_once():
    """The directory is checked before any network call."""
    done = run_cli(
        "serve",
        BGE_M3_CACHE_DIR="/dev/null/impossible",
        BGE_M3_BIND="127.0.0.1:0",
        BGE_M3_LOG_FORMAT="text",
        HF_ENDPOINT="http://127.0.0.1:9",
    )

    assert done.returncode == 1
    assert "Cannot create or access model cache directory /dev/null/impossible" in done.stdout


def test_a_port_in_use_stops_the_start(preview):
    """A second server on the same port does not start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("serve", **{**preview, "BGE_M3_BIND": f"127.0.0.1:{port}"})

    assert done.returncode == 1
    assert "address already in use" in done.stdout


def test_the_server_writes_nothing_into_the_home_directory(preview, tmp_path):
    """Nothing reports usage: the engine's own telemetry is off, and leaves no files."""
    with running_server({**preview, "HOME": str(tmp_path)}) as server:
        post(server, "/v1/embeddings", {"input": "a"})

    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("arguments", [["--url", "http://127.0.0.1:abc/"], ["--url", "file:///"]])
def test_a_health_check_of_no_address_fails_with_a_sentence(arguments):
    """Whatever is given, the answer is an exit code and a reason."""
    done = run_cli("healthcheck", *arguments)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_healthcheck_tells_a_healthy_server_from_none(server):
    """Exit code 0 for a healthy server, 1 where nobody answers."""
    port = server.url.rpartition(":")[2]

    assert run_cli("healthcheck", BGE_M3_BIND=f"0.0.0.0:{port}").returncode == 0
    assert run_cli("healthcheck", BGE_M3_BIND="127.0.0.1:9").returncode == 1


def test_the_openapi_document_is_version_3_1(preview):
    """`bge-m3-server openapi` prints the document with every public route."""
    document = json.loads(run_cli("openapi", **preview).stdout)

    assert document["openapi"].startswith("3.1")
    assert {"/v1/embeddings", "/v1/sparse-embeddings", "/v1/embeddings:both"} <= set(
        document["paths"]
    )


def test_the_console_script_knows_its_version():
    """The installed command answers --version."""
    done = subprocess.run(
        [Path(sys.executable).with_name("bge-m3-server"), "--version"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("bge-m3-server 0.")

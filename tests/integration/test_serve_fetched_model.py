"""From a hub to answers: fetch, verify, serve, and serve again with the hub gone."""

import json
import shutil

import httpx
import pytest

from tests.support.hub_stand_in import BAAI, Fault, hub_stand_in, tiny_repositories
from tests.support.server_process import post, run_cli, running_server
from tests.support.tiny_models import write_tiny_model

HUB_IS_GONE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Both published repositories, in small."""
    with hub_stand_in(tiny_repositories(tmp_path_factory.mktemp("repositories"))) as stand_in:
        yield stand_in


@pytest.mark.parametrize("variant", ["fp32", "fp16"])
def test_a_first_start_downloads_and_a_second_needs_no_hub(hub, tmp_path, variant):
    """Both published layouts serve dense and sparse, first from the hub, then from the cache."""
    settings = {"BGE_M3_MODEL": variant, "BGE_M3_CACHE_DIR": str(tmp_path)}
    with running_server({**settings, "HF_ENDPOINT": hub.endpoint}) as server:
        online = post(server, "/v1/embeddings:both", {"input": ["ab", "c"]}).json()
    seen = len(hub.requests)
    with running_server({**settings, "HF_ENDPOINT": HUB_IS_GONE}) as server:
        offline = post(server, "/v1/embeddings:both", {"input": ["ab", "c"]}).json()

    assert online == offline
    assert online["model"] == "bge-m3"
    assert [len(item["embedding"]) for item in online["data"]] == [16, 16]
    assert seen > 0
    assert len(hub.requests) == seen


def test_the_server_answers_loading_while_it_downloads(hub, tmp_path):
    """Health and requests get a clear 503 until the model is there; SIGTERM still works."""
    hub.faults["onnx/model.onnx"] = Fault(status=503)
    try:
        settings = {"BGE_M3_CACHE_DIR": str(tmp_path), "HF_ENDPOINT": hub.endpoint}
        with running_server(settings, wait_until_ready=False) as server:
            health = httpx.get(f"{server.url}/health")
            refused = post(server, "/v1/embeddings", {"input": "a"})
            models = httpx.get(f"{server.url}/v1/models")
            live = httpx.get(f"{server.url}/live")
            code = server.stop()
    finally:
        hub.faults.clear()

    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "model not ready"
    assert (models.status_code, models.json()["data"]) == (200, [])
    assert live.status_code == 200
    assert code == 0


def test_fetch_into_a_directory_makes_a_model_that_needs_no_hub(hub, tmp_path):
    """`fetch --dir` and BGE_M3_MODEL_DIR carry a model into a closed network."""
    directory = tmp_path / "model"
    done = run_cli(
        "fetch", "--variant", "fp32", "--dir", str(directory),
        HF_ENDPOINT=hub.endpoint, BGE_M3_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"BGE_M3_MODEL_DIR={directory}" in done.stdout

    moved = tmp_path / "elsewhere"
    shutil.move(directory, moved)
    settings = {"BGE_M3_MODEL_DIR": str(moved), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": HUB_IS_GONE}
    with running_server(settings) as server:
        answer = post(server, "/v1/embeddings", {"input": "ab"})
    assert answer.status_code == 200


def test_a_truncated_file_stops_the_start_by_name(hub, tmp_path):
    """A damaged model is never loaded."""
    settings = {"BGE_M3_CACHE_DIR": str(tmp_path), "HF_ENDPOINT": hub.endpoint}
    assert run_cli("fetch", **settings).returncode == 0
    (data,) = tmp_path.glob("models--*/snapshots/*/onnx/model.onnx_data")
    with data.open("r+b") as file:
        file.truncate(100)

    done = run_cli("serve", BGE_M3_BIND="127.0.0.1:0", **settings)
    assert done.returncode == 1
    assert "onnx/model.onnx_data is truncated" in done.stdout

    assert run_cli("fetch", **settings).returncode == 0, "fetch repairs what it finds damaged"
    with running_server(settings) as server:
        assert post(server, "/v1/embeddings", {"input": "ab"}).status_code == 200


def test_files_that_claim_to_be_bge_m3_must_give_its_lexical_weights(tmp_path):
    """A hub that serves another 1024-wide model under BGE-M3's revision is found out at start."""
    write_tiny_model(tmp_path / "repository", hidden=1024, external_data=True)
    repositories = tiny_repositories(tmp_path / "tiny")
    repositories[BAAI] = {
        str(path.relative_to(tmp_path / "repository")): path.read_bytes()
        for path in (tmp_path / "repository").rglob("*")
        if path.is_file()
    }
    with hub_stand_in(repositories) as hub:
        done = run_cli(
            "serve",
            BGE_M3_BIND="127.0.0.1:0",
            BGE_M3_CACHE_DIR=str(tmp_path / "cache"),
            HF_ENDPOINT=hub.endpoint,
        )

    assert done.returncode == 1
    assert "failed its self-test: BGE-M3 gives 'What is BGE M3?' the lexical ids" in done.stdout


def test_a_directory_without_a_model_stops_the_start(tmp_path):
    """The message lists what was expected and what is there."""
    (tmp_path / "notes.txt").write_text("nothing here")

    done = run_cli("serve", BGE_M3_BIND="127.0.0.1:0", BGE_M3_MODEL_DIR=str(tmp_path))

    assert done.returncode == 1
    error = json.loads(done.stdout.splitlines()[-1])["fields"]["message"]
    assert "expected onnx/model.onnx or model.onnx" in error
    assert "notes.txt" in error


def test_another_model_is_not_served_as_bge_m3(tmp_path):
    """A directory that cannot hold BGE-M3 is served under its own name."""
    write_tiny_model(tmp_path / "my-model")
    with running_server({"BGE_M3_MODEL_DIR": str(tmp_path / "my-model")}) as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        answer = post(server, "/v1/embeddings", {"input": "ab"}).json()

    assert model["id"] == answer["model"] == "my-model"

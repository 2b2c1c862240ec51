"""What was fetched once serves without a network, and damage to it is found and repaired."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.models.onnx_file import check_external_data
from bge_m3_server.adapters.models.published import VARIANTS

from tests.support.hub_stand_in import BAAI, WEIGHTS, XENOVA

pytest_plugins = ["tests.support.hub_fixtures"]


def offline(**more):
    return {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", **more}


@pytest.mark.parametrize(
    ("variant", "repository"), [("fp32", BAAI), ("fp16", XENOVA)], ids=["fp32", "fp16"]
)
def test_a_variant_is_fetched_once_and_then_needs_no_network(
    fetch, hub, tmp_path, variant, repository
):
    """All files arrive in the hub's own cache layout; a second fetch opens no connection."""
    repositories = hub.repositories
    outcome = fetch(variant)

    graph = Path(outcome["graph"])
    source = VARIANTS[variant].source
    folder = f"models--{repository.replace('/', '--')}"
    snapshot = tmp_path / "cache" / folder / "snapshots" / source.revision
    assert graph == snapshot / VARIANTS[variant].graph
    for name in source.names:
        assert (snapshot / name).read_bytes() == repositories[repository][name]
        assert (snapshot / name).is_symlink()
    assert Path(outcome["sparse"]).read_bytes() == repositories[BAAI]["sparse_linear.pt"]
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    check_external_data(graph)
    onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])

    hub.requests.clear()
    again = fetch(variant)
    assert again["graph"] == outcome["graph"]
    assert again["connections"] == 0
    assert hub.requests == []


def test_the_cache_serves_offline(fetch):
    """With HF_HUB_OFFLINE and no server, what is cached is found and verified."""
    fetch()

    outcome = fetch(environment=offline())

    assert "graph" in outcome
    assert outcome["connections"] == 0


def test_a_cache_filled_by_the_hub_library_is_used(tmp_path, hub, fetch):
    """Files that huggingface-hub itself downloaded are taken, and verified by their names."""
    names = [*VARIANTS["fp32"].source.names, "sparse_linear.pt", "colbert_linear.pt"]
    revision = VARIANTS["fp32"].source.revision
    code = (
        "import sys\nfrom huggingface_hub import hf_hub_download\n"
        f"for name in {names!r}: hf_hub_download({BAAI!r}, name, revision={revision!r}, "
        "cache_dir=sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache")],
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf-home")},
        check=True,
        capture_output=True,
    )

    assert "graph" in fetch(environment=offline())


def test_offline_without_the_files_says_so(fetch):
    """HF_HUB_OFFLINE with an empty cache ends in a DownloadError that opened no connection."""
    outcome = fetch(environment=offline())

    assert outcome["error"] == "DownloadError"
    assert "HF_HUB_OFFLINE" in outcome["message"]
    assert outcome["connections"] == 0


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_damage_to_a_cached_file_is_found(fetch, hub, repositories, damage):
    """A cached file that changed is refused by name at the next start, and `repair` replaces it."""
    weights = Path(fetch()["graph"]).with_name("model.onnx_data")
    content = repositories[BAAI][WEIGHTS]
    damaged = content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
    weights.resolve().write_bytes(damaged)

    outcome = fetch(environment=offline())
    assert outcome["error"] == "CorruptFileError"
    assert str(weights) in outcome["message"]

    hub.requests.clear()
    assert "graph" in fetch(repair=True)
    assert weights.read_bytes() == content
    assert len(hub.content_requests(WEIGHTS)) == 1
    assert "graph" in fetch(environment=offline())


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_damage_is_found_without_a_record(fetch, name):
    """A cache that something else filled is checked against the hashes that name its blobs."""
    snapshot = Path(fetch()["graph"]).parents[1]
    (snapshot / "bge-m3-server.files.json").unlink()
    content = (snapshot / name).read_bytes()
    (snapshot / name).resolve().write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    outcome = fetch(environment=offline())

    assert outcome["error"] == "CorruptFileError"
    assert f"{snapshot / name} is truncated or corrupt" in outcome["message"]


def test_repair_finds_damage_that_kept_size_and_time(fetch, repositories):
    """An explicit fetch reads every byte, where a start trusts an unchanged size and time."""
    weights = Path(fetch()["graph"]).with_name("model.onnx_data").resolve()
    status = weights.stat()
    weights.write_bytes(bytes(status.st_size))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert "graph" in fetch(environment=offline())
    assert "graph" in fetch(repair=True)
    assert weights.read_bytes() == repositories[BAAI][WEIGHTS]


def test_a_damaged_record_costs_only_a_new_hash(fetch):
    """Without a usable record the cached files are hashed again, against their names."""
    graph = Path(fetch()["graph"])
    record = graph.parents[1] / "bge-m3-server.files.json"
    good = record.read_bytes()
    record.write_bytes(good[: len(good) // 2])

    assert "graph" in fetch(environment=offline())
    sizes = {name: entry["size_bytes"] for name, entry in json.loads(good)["files"].items()}
    again = json.loads(record.read_bytes())["files"]
    assert {name: entry["size_bytes"] for name, entry in again.items()} == sizes


def test_an_impossible_cache_directory_is_refused_before_any_request(fetch, hub):
    """The directory is tried first; the message says which one and why."""
    outcome = fetch(cache_dir="/dev/null/impossible")

    assert outcome["error"] == "CacheDirectoryError"
    assert outcome["message"] == (
        "Cannot create or access model cache directory /dev/null/impossible: Not a directory; "
        "set BGE_M3_CACHE_DIR, or --dir of fetch, to a directory that can be written"
    )
    assert outcome["connections"] == 0
    assert hub.requests == []


def test_a_fetched_directory_serves_without_a_network(fetch, hub, tmp_path, repositories):
    """`directory` gets plain files under their own names, which `local_model` accepts."""
    directory = tmp_path / "model"
    outcome = fetch(directory=str(directory))
    assert Path(outcome["graph"]) == directory / "onnx/model.onnx"
    assert not (tmp_path / "cache").exists()

    files = local_model(directory)
    assert files.graph_path == directory / "onnx/model.onnx"
    assert files.colbert_path == directory / "colbert_linear.pt"
    onnxruntime.InferenceSession(str(files.graph_path), providers=["CPUExecutionProvider"])

    hub.requests.clear()
    assert "graph" in fetch(directory=str(directory), repair=True)
    assert hub.requests == []


def test_a_directory_takes_what_is_already_there(fetch, hub, tmp_path, repositories):
    """Files without a record are compared with the hub's hashes and not fetched again if right."""
    directory = tmp_path / "model"
    (directory / "onnx").mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(repositories[BAAI][WEIGHTS])
    (directory / "tokenizer.json").write_bytes(b"{}")

    assert "graph" in fetch(directory=str(directory))

    assert hub.content_requests(WEIGHTS) == []
    assert (directory / "tokenizer.json").read_bytes() == repositories[BAAI]["tokenizer.json"]

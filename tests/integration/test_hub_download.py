"""Fetching from a stand-in hub, in processes of their own: one per environment.

huggingface-hub reads its environment when it is imported.
"""

import contextlib
import functools
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

from tests.support.hub_stand_in import (
    BAAI,
    XENOVA,
    Fault,
    hub_hash,
    hub_stand_in,
    tiny_repositories,
)

WORKER = """
import io, json, logging, sys
from pathlib import Path

connections = []
sys.addaudithook(lambda event, args: event == "socket.connect" and connections.append(args[1]))

from bge_m3_server.adapters.models.hub import fetch_model
from bge_m3_server.domain.errors import ModelError

for line in sys.stdin:
    options = json.loads(line)
    directory = options.pop("directory", None)
    connections.clear()
    sys.stderr = io.StringIO()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", force=True)
    try:
        files = fetch_model(
            options.pop("variant"),
            Path(options.pop("cache_dir")),
            directory=directory and Path(directory),
            **{"retry_pauses_seconds": (0.01, 0.01), **options},
        )
        outcome = {"graph": str(files.graph_path), "sparse": str(files.sparse_path)}
    except ModelError as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    outcome |= {"connections": len(connections), "log": sys.stderr.getvalue()}
    print(json.dumps(outcome), flush=True)
"""

WEIGHTS = "onnx/model.onnx_data"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    return tiny_repositories(tmp_path_factory.mktemp("repositories"))


@pytest.fixture(scope="module")
def stand_in(repositories):
    with hub_stand_in(repositories) as running:
        yield running


@pytest.fixture
def hub(stand_in):
    """The stand-in without faults, and with no request seen."""
    stand_in.faults.clear()
    stand_in.requests.clear()
    return stand_in


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Start one process per environment, and stop them all in the end."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("HF_") and not name.upper().endswith("_PROXY")
    }
    clean["HF_HOME"] = str(tmp_path_factory.mktemp("hf-home"))
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(environment):
            worker = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env=clean | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(worker)
            stack.callback(worker.stdin.close)
            return worker

        yield start


@pytest.fixture
def fetch(tmp_path, hub, workers):
    """Run `fetch_model` in a process with this environment and return its outcome."""

    def run(variant="fp32", environment=None, **options):
        worker = workers(
            tuple(sorted({"HF_ENDPOINT": hub.endpoint, **(environment or {})}.items()))
        )
        options = {"variant": variant, "cache_dir": str(tmp_path / "cache"), **options}
        print(json.dumps(options), file=worker.stdin, flush=True)
        return json.loads(worker.stdout.readline())

    return run


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


def test_a_broken_connection_is_continued(fetch, hub, repositories):
    """A download that was cut goes on where it stopped, within the same run."""
    hub.faults[WEIGHTS] = Fault(cut_after_bytes=1000, times=3)

    outcome = fetch()

    assert "graph" in outcome
    ranges = [request.headers.get("range") for request in hub.content_requests(WEIGHTS)]
    assert ranges == [None, "bytes=1000-", "bytes=2000-", "bytes=3000-"]


def test_a_restart_continues_the_download(fetch, hub, tmp_path, repositories):
    """What a run that gave up left behind is not fetched again by another process."""
    blob = hub_hash(WEIGHTS, repositories[BAAI][WEIGHTS])
    hub.faults[WEIGHTS] = Fault(cut_after_bytes=1000, times=1)
    first = fetch(retry_pauses_seconds=[])
    assert first["error"] == "DownloadError"
    assert WEIGHTS in first["message"]
    (partial,) = (tmp_path / "cache").rglob("*.incomplete")
    assert partial.name == f"{blob}.incomplete"

    hub.requests.clear()
    assert "graph" in fetch(environment={"HF_HUB_OFFLINE": "0"})
    (request,) = hub.content_requests(WEIGHTS)
    assert request.headers["range"] == "bytes=1000-"
    assert hub.content_requests("onnx/model.onnx") == []


def test_a_truncated_file_is_refused_by_name(fetch, hub, tmp_path, repositories):
    """A hub that serves only part of a file gives a CorruptFileError, and nothing is kept."""
    hub.faults[WEIGHTS] = Fault(content=repositories[BAAI][WEIGHTS][:-10])

    outcome = fetch()

    assert outcome["error"] == "CorruptFileError"
    assert WEIGHTS in outcome["message"]
    assert "truncated" in outcome["message"]
    assert not list((tmp_path / "cache").rglob("*onnx_data*"))


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_corrupted_file_is_refused_by_name(fetch, hub, repositories, name):
    """Right size, wrong bytes: both kinds of hash find it; it is fetched twice, then refused."""
    content = bytearray(repositories[BAAI][name])
    content[7] ^= 1
    hub.faults[name] = Fault(content=bytes(content))

    outcome = fetch()

    assert outcome["error"] == "CorruptFileError"
    assert name in outcome["message"]
    assert len(hub.content_requests(name)) == 2


def test_a_file_damaged_in_transit_is_fetched_once_more(fetch, hub, repositories):
    """One bad delivery is repaired without anybody noticing."""
    size = len(repositories[BAAI][WEIGHTS])
    hub.faults[WEIGHTS] = Fault(content=bytes(size), times=1)

    assert "graph" in fetch()
    assert len(hub.content_requests(WEIGHTS)) == 2


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


def test_processes_that_start_together_share_one_download(fetch, hub, workers, tmp_path):
    """Two servers over one cache fetch each file once."""
    options = {"variant": "fp32", "cache_dir": str(tmp_path / "cache")}
    pair = [
        workers((("HF_ENDPOINT", hub.endpoint),)),
        workers((("HF_ENDPOINT", hub.endpoint), ("HF_HUB_OFFLINE", "0"))),
    ]
    for worker in pair:
        print(json.dumps(options), file=worker.stdin, flush=True)
    outcomes = [json.loads(worker.stdout.readline()) for worker in pair]

    assert all("graph" in outcome for outcome in outcomes), outcomes
    assert len(hub.content_requests(WEIGHTS)) == 1


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


def test_the_token_goes_to_the_hub_and_nowhere_else(fetch, hub):
    """HF_TOKEN is sent to the endpoint, and not to the origin that large files come from."""
    assert "graph" in fetch(environment={"HF_TOKEN": "hf_tiny"})

    sent = {(seen.origin, seen.headers.get("authorization")) for seen in hub.file_requests}
    assert sent == {("hub", "Bearer hf_tiny"), ("cdn", None)}


def test_requests_go_through_a_proxy(fetch, hub):
    """HTTP_PROXY is honoured: a host that does not exist is reached through it."""
    outcome = fetch(
        "fp16",
        environment={"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.endpoint},
    )

    assert "graph" in outcome, outcome
    assert {seen.headers["host"] for seen in hub.file_requests if seen.method == "HEAD"} == {
        "hub.invalid"
    }


@pytest.mark.parametrize(
    ("status", "told"), [(404, "404"), (500, "500"), (401, "HF_TOKEN")], ids=str
)
def test_a_refusal_names_file_endpoint_and_ways_out(fetch, hub, status, told):
    """Whatever the hub answers, the error says what was wanted, from where, and what to do."""
    hub.faults["onnx/model.onnx"] = Fault(status=status)

    outcome = fetch(environment={"HF_TOKEN": "hf_secret"})

    assert outcome["error"] == "DownloadError"
    for part in (
        told,
        "onnx/model.onnx",
        BAAI,
        hub.endpoint,
        "HF_ENDPOINT",
        "bge-m3-server fetch",
        "BGE_M3_MODEL_DIR",
    ):
        assert part in outcome["message"]
    assert "hf_secret" not in outcome["message"] + outcome["log"]
    assert len(hub.file_requests) == (3 if status == 500 else 1)


def test_a_hub_that_is_down_is_a_download_error(fetch):
    """No server at the endpoint: the error names it."""
    outcome = fetch(environment={"HF_ENDPOINT": "http://127.0.0.1:9"})

    assert outcome["error"] == "DownloadError"
    assert "http://127.0.0.1:9" in outcome["message"]
    assert outcome["log"].count("trying again") == 2


@pytest.mark.parametrize(
    "endpoint",
    ["junk", "ftp://hub", "http://", "http://a b", "http://h.invalid"],
)
def test_an_endpoint_that_cannot_exist_is_refused_at_once(fetch, endpoint):
    """What no second attempt would mend is not tried again."""
    outcome = fetch(environment={"HF_ENDPOINT": endpoint})

    assert outcome["error"] == "DownloadError"
    assert endpoint in outcome["message"]
    assert "trying again" not in outcome["log"]


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


def test_progress_is_logged_where_there_is_no_terminal(fetch, repositories):
    """Each file has log lines with its name, share and size."""
    log = fetch()["log"]

    assert f"downloading {WEIGHTS}: 0 % of 0.0 MB" in log
    assert f"downloading {WEIGHTS}: 100 % of 0.0 MB" in log


def test_progress_is_a_bar_when_asked_for(fetch):
    """With `progress` each file has a bar and no log lines."""
    log = fetch(progress=True)["log"]

    assert f"{WEIGHTS}: 100%" in log
    assert "downloading" not in log

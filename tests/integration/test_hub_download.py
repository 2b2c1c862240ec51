"""Fetching from a hub: what is transferred, how often, with what, and what is said of a failure."""

import json

import pytest

from tests.support.hub_stand_in import BAAI, WEIGHTS, Fault, hub_hash

pytest_plugins = ["tests.support.hub_fixtures"]


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

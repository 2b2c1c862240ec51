"""A real server in little memory: what fits is served, what does not is refused with figures."""

import contextlib

import httpx
import pytest

from benchmarks.memory_limit import REFUSAL, memory_group, requests, run
from benchmarks.synthetic_bge_m3 import Shape, write_synthetic_bge_m3
from tests.support.server_process import post, running_server

AS_IT_IS = {"BGE_M3_MODEL": "fp32", "BGE_M3_EP": "cpu"}
"""The graph whose attention grows with the square of the length."""

MIB = 2**20
SMALL = Shape(
    layers=2, hidden=64, attention_heads=8, intermediate=256, positions=4098, vocabulary=32
)
"""Small weights, but scores that need 400 MiB and more for a text of 4096 tokens."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic")
    write_synthetic_bge_m3(path, SMALL)
    return path


def text(tokens):
    return " ".join(["w1"] * (tokens - 2))


def test_the_budget_holds_where_the_kernel_kills(directory):
    """Mixed requests in a group with a hard limit: no kill, and the peak is within the budget."""
    with contextlib.ExitStack() as stack:
        try:  # only making the group may be impossible: what fails inside it is a failure
            group = stack.enter_context(memory_group(640 * MIB))
        except OSError as error:
            pytest.skip(f"no cgroup v1 memory group can be made here: {error}")
        report = run(
            group,
            {**AS_IT_IS, "BGE_M3_MODEL_DIR": str(directory)},
            count=24,
            request_tokens=4096,
            clients=4,
        )

    assert report.problems() == []
    assert report.tuning["memory_source"] == "cgroup_v1"
    assert report.tuning["probe_status"] == "complete"
    assert set(report.answers) == {200, 413}
    assert report.answers.total() == 24
    assert report.shortest_refused_tokens > report.longest_served_tokens > 512


def test_a_text_that_cannot_fit_is_refused_and_others_are_served(directory, tmp_path):
    """413 names the text, its need, the room and the longest text that fits, which then fits."""
    settings = {
        **AS_IT_IS,
        "BGE_M3_MODEL_DIR": str(directory),
        "BGE_M3_CACHE_DIR": str(tmp_path),
        "BGE_M3_DISABLE_AUTO_BUDGET": "",
        "BGE_M3_AVAILABLE_MEMORY_BYTES": str(640 * MIB),
    }
    with running_server(settings) as server:
        server.wait_for_log("probe complete")
        refused = post(server, "/v1/embeddings", {"input": [text(100), text(4096)]})
        error = refused.json()["error"]
        longest = int(error["message"].rpartition("at most ")[2].split()[0])
        told = httpx.get(f"{server.url}/health").json()["tuning"]["longest_text_tokens"]
        served = post(server, "/v1/embeddings", {"input": [text(100), text(longest)]})
        beyond = post(server, "/v1/sparse-embeddings", {"input": text(longest + 1)})

    assert refused.status_code == 413
    assert REFUSAL.fullmatch(error["message"])
    assert error["message"].startswith("input[1] has 4096 tokens")
    assert error["param"] == "input[1]"
    assert longest == told > 512
    assert served.status_code == 200
    assert [len(item["embedding"]) for item in served.json()["data"]] == [64, 64]
    assert beyond.status_code == 413 or "sparse" in beyond.text


def test_mixed_requests_reach_all_sizes():
    """Numbers and lengths go to both ends, and no request holds more than it may."""
    asked = list(requests(500, 8192, 8192))

    assert len(asked) == 500
    assert asked == list(requests(500, 8192, 8192))
    assert asked[0] == [8192]
    assert {len(lengths) for lengths in asked} >= {1, 256}
    assert all(sum(lengths) <= 8192 for lengths in asked)
    assert sum(max(lengths) > 4096 for lengths in asked) > 20
    assert sum(len(lengths) > 64 for lengths in asked) > 50

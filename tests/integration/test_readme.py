"""The README's examples, run against the server that `make run` starts."""

import json
import re
import shlex
import subprocess
from base64 import b64decode
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
from bge_m3_server.app.config import load_config

from tests.support.openvino_mark import needs_openvino
from tests.support.preview_fixture import preview_cache_dir
from tests.support.server_process import running_server

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (curl .*)\n(.*)\n```", README)

OF_THE_MOMENT = {"created", "elapsed_ms", "drain_tokens_per_second"}
"""Fields that differ from one run to the next."""


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "openvino",
            marks=needs_openvino,
        ),
    ],
)
def server(request):
    """The server of `make run`, on either engine that it may choose."""
    settings = {
        "BGE_M3_MODEL": "preview",
        "BGE_M3_EP": request.param,
        "BGE_M3_CACHE_DIR": str(preview_cache_dir()),
    }
    with running_server(settings) as running:
        yield running


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_an_example_prints_what_the_readme_shows(server, command, shown):
    """Each curl line gives the JSON below it."""
    arguments = shlex.split(command.replace("http://127.0.0.1:8081", server.url))
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)

    answer, expected = decoded(json.loads(done.stdout)), decoded(json.loads(shown))
    assert answer == approximately(expected)


def test_there_is_an_example_for_each_endpoint():
    """No public route goes without real output."""
    commands = " ".join(command for command, _ in EXAMPLES)

    for route in (
        "/v1/embeddings ",
        "/v1/sparse-embeddings ",
        "/v1/embeddings:both ",
        "/v1/models ",
        "/v1/models/preview",
        "/health ",
        "/ready ",
        "/health/deep ",
        "/live",
    ):
        assert route in commands


def test_every_variable_is_documented():
    """Each variable that the server reads is in the README, and the other way round."""
    documented = set(re.findall(r"`(BGE_M3_\w+|RUST_LOG|\w+_MAX_CPU_ISA)`", README))

    class Recorder(dict):
        def get(self, name, default=None):
            asked.add(name)
            return default

    asked: set[str] = set()
    load_config(Recorder(), "linux")
    assert documented == asked


def test_the_python_example_runs(server):
    """The OpenAI client example works as printed."""
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    printed = []
    exec(  # noqa: S102  the README's own code
        compile(code.replace("http://127.0.0.1:8081", server.url), "README.md", "exec"),
        {"print": lambda *values: printed.append(values)},
    )

    assert printed == [(2, 20)]


def decoded(answer):
    """The answer with base64 vectors turned into numbers."""
    for item in answer.get("data", []):
        if isinstance(item.get("embedding"), str):
            item["embedding"] = np.frombuffer(b64decode(item["embedding"]), "<f4").tolist()
    return answer


def approximately(value):
    """Numbers may differ in the last digits from one processor to another."""
    match value:
        case {"probe_status": _} | {
            "live": _,
            "total": _,
        }:  # figures of the machine: their names are what is promised
            return dict.fromkeys(value, ANY)
        case dict():
            return {
                name: ANY if name in OF_THE_MOMENT else approximately(item)
                for name, item in value.items()
            }
        case list():
            return [approximately(item) for item in value]
        case float():
            return pytest.approx(value, abs=1e-4)
        case _:
            return value

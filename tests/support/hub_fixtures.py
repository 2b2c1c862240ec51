"""Fixtures that fetch from a stand-in hub, in processes of their own: one per environment.

huggingface-hub reads its environment when it is imported.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys

import pytest

from tests.support.hub_stand_in import hub_stand_in, tiny_repositories

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

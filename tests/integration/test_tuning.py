"""The memory budget of a real server: measured, remembered, pinned, refused."""

import json
import signal
import time

import httpx
import pytest

from benchmarks.synthetic_bge_m3 import Shape, write_synthetic_bge_m3
from tests.support.preview_fixture import preview_cache_dir, preview_files
from tests.support.server_process import cli, post, run_cli, running_server

FIGURES = {
    "a_bytes_per_token",
    "b_bytes_per_token_sq",
    "max_workspace_bytes",
    "total_workspace_bytes",
    "available_bytes",
    "model_rss_bytes_per_worker",
    "worst_case_peak_bytes",
    "utilization_pct",
    "longest_text_tokens",
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A server that measures the preview model, with nothing remembered yet."""
    preview_files()
    directory = tmp_path_factory.mktemp("cache")
    (directory / "preview").symlink_to(preview_cache_dir().resolve() / "preview")
    return {
        "BGE_M3_MODEL": "preview",
        "BGE_M3_EP": "cpu",
        "BGE_M3_CACHE_DIR": str(directory),
        "BGE_M3_LOG_FORMAT": "json",
        "BGE_M3_WORKERS": "2",
        "BGE_M3_DISABLE_AUTO_BUDGET": "",
    }


@pytest.fixture(scope="module")
def starts(settings):
    """Tuning blocks and logs of a first and a second start: while measuring, afterwards, again."""
    with running_server(settings) as server:
        measuring = tuning_of(server)
        answered = post(server, "/v1/embeddings", {"input": "at once"}).status_code
        server.wait_for_log("probe complete")
        measured = tuning_of(server)
        assert server.stop() == 0
    with running_server({**settings, "BGE_M3_IDLE_TIMEOUT_SECS": "1"}) as again:
        remembered = tuning_of(again)
        again.wait_for_log("Unloaded the model")
        assert post(again, "/v1/embeddings", {"input": "again"}).status_code == 200
        reloaded = tuning_of(again)
        assert again.stop() == 0
    return {
        "measuring": measuring,
        "answered": answered,
        "measured": measured,
        "remembered": remembered,
        "reloaded": reloaded,
        "second log": "".join(again.log),
    }


def tuning_of(server):
    return httpx.get(f"{server.url}/health").json()["tuning"]


def test_requests_are_served_while_the_probe_runs(starts):
    """Readiness waits for no measurement; conservative figures from the model's shape serve."""
    measuring = starts["measuring"]

    assert starts["answered"] == 200
    assert measuring["probe_status"] == "running"
    assert measuring["coefficients_source"] == "conservative"
    assert measuring["a_bytes_per_token"] == 7 * 24 * 384 * 4
    assert measuring["max_workspace_bytes"] < starts["measured"]["max_workspace_bytes"]


def test_health_tells_what_was_measured(starts):
    """Every figure of the tuning block is there, with its source and the quality of the fit."""
    measured = starts["measured"]

    assert measured["probe_status"] == "complete"
    assert measured["coefficients_source"] == "probe"
    assert measured["reason"] == "7 of 7 shapes were measured"
    assert all(measured[figure] > 0 for figure in FIGURES)
    assert 0 < measured["fit_r_squared"] <= 1
    assert measured["fit_worst_relative_error"] > 0
    assert measured["fit_margin"] > 1
    assert measured["longest_text_tokens"] == 512
    assert measured["total_workspace_bytes"] == 2 * measured["max_workspace_bytes"]
    assert measured["excess_passes"] == 0


def test_the_next_start_remembers(starts):
    """Coefficients come from the cache, nothing is measured, also after an idle time."""
    measured, remembered = starts["measured"], starts["remembered"]

    assert remembered["probe_status"] == "cache_hit"
    assert remembered["coefficients_source"] == "cache"
    for figure in ("a_bytes_per_token", "b_bytes_per_token_sq", "fit_r_squared"):
        assert remembered[figure] == measured[figure]
    assert starts["reloaded"]["probe_status"] == "cache_hit"
    assert "probe complete" not in starts["second log"]


@pytest.mark.parametrize(
    ("pins", "source"),
    [
        (
            {
                "BGE_M3_DISABLE_AUTO_BUDGET": "1",
                "BGE_M3_TOKEN_BUDGET": "8192",
                "BGE_M3_COST_MODEL_A": "1000",
                "BGE_M3_COST_MODEL_B": "1",
            },
            "BGE_M3_DISABLE_AUTO_BUDGET",
        ),
        ({"BGE_M3_ONNX_BATCH_SIZE": "16", "BGE_M3_COST_MODEL_A": "1000"}, "BGE_M3_ONNX_BATCH_SIZE"),
    ],
)
def test_settings_pin_the_cost_model(settings, pins, source):
    """The strongest setting counts; one that is deprecated or incomplete is warned about."""
    with running_server({**settings, **pins}) as server:
        tuning = tuning_of(server)
        log = "".join(server.log)

    assert tuning["probe_status"] == "disabled"
    assert tuning["coefficients_source"] == source
    assert tuning["total_workspace_bytes"] >= tuning["max_workspace_bytes"]
    assert f'"by":"{source}"' in log
    is_translated = "BGE_M3_ONNX_BATCH_SIZE" in pins
    assert ("deprecated: set BGE_M3_TOKEN_BUDGET=8192 instead" in log) == is_translated
    assert ("count only together" in log) == is_translated
    if is_translated:
        assert tuning["max_workspace_bytes"] == 8192 * (7 * 24 * 384 * 4 + 3 * 12 * 4 * 512)


def test_the_probe_command_prints_and_draws(settings, tmp_path):
    """Measured peaks, fit and largest batches as text; peaks and surface as a picture."""
    pytest.importorskip("matplotlib", reason="drawing needs the extra `plot`")
    picture = tmp_path / "probe.svg"
    done = run_cli("probe", "--plot", str(picture), **settings, BGE_M3_MAX_SEQ_LENGTH="128")

    assert done.returncode == 0, done.stderr
    assert "probe: complete, 4 of 4 shapes were measured" in done.stdout
    assert "bytes per token pair" in done.stdout
    assert "largest batch" in done.stdout
    assert picture.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_the_probe_command_has_nothing_to_measure_where_the_budget_is_pinned(settings):
    """It says which setting pins it."""
    done = run_cli("probe", **{**settings, "BGE_M3_TOKEN_BUDGET": "8192"})

    assert done.returncode == 1
    assert "nothing was measured: pinned by BGE_M3_TOKEN_BUDGET" in done.stderr


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    """The directory is named."""
    done = run_cli("probe", "--plot", str(tmp_path / "missing" / "probe.svg"))

    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'missing'} is no directory that can be written" in done.stderr


def test_an_interrupted_probe_command_ends_with_its_own_exit_code(tmp_path):
    """Also amid a pass, which nothing can interrupt and which takes seconds."""
    write_synthetic_bge_m3(tmp_path, Shape(layers=4, hidden=256, intermediate=512, vocabulary=64))
    variables = {"BGE_M3_MODEL_DIR": str(tmp_path), "BGE_M3_CACHE_DIR": str(tmp_path / "cache")}
    with cli("probe", **variables, BGE_M3_EP="cpu", BGE_M3_MODEL="fp32") as process:
        for line in process.stdout:
            if "probe cache miss" in line:
                break
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors


def test_sigterm_ends_the_probe(settings):
    """A stop does not wait for shapes that have not begun."""
    with running_server({**settings, "BGE_M3_DISABLE_PROBE_CACHE": "1"}) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=15) == 0
        log = "".join(server.log)

    assert "probe complete" not in log
    assert "probe cancelled by shutdown" in log
    assert "probe without a result" not in log


def test_memory_that_cannot_suffice_stops_the_start(settings):
    """Exit code 2, with the arithmetic and three ways out."""
    done = run_cli(
        "serve",
        **{
            **settings,
            "BGE_M3_BIND": "127.0.0.1:0",
            "BGE_M3_AVAILABLE_MEMORY_BYTES": str(300 * 1024**2),
        },
    )
    message = json.loads(done.stdout.splitlines()[-1])

    assert done.returncode == 2
    text = json.dumps(message)
    assert "start failed: memory does not suffice for one text of 512 tokens" in text
    assert "300 MiB available (override)" in text
    for way in ("1. give the process", "2. load a smaller model", "3. "):
        assert way in text

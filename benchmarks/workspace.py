"""What forward passes of BGE-M3's shape need, and how well the fitted cost model tells.

Runs the server's own probe on the model of `synthetic_bge_m3`, then shapes that the probe never
saw, and prints peaks, fit and errors. Peaks do not depend on how busy the machine is.

    .venv/bin/python -m benchmarks.synthetic_bge_m3 .cache/synthetic
    .venv/bin/python -m benchmarks.workspace .cache/synthetic --ep cpu --model fp32
"""

import argparse
import json
import multiprocessing
import platform
import sys
import threading
import time
from pathlib import Path

import attrs
import onnxruntime
from bge_m3_server.adapters.memory.cpu_count import cpu_count, cpu_model
from bge_m3_server.adapters.memory.peak import peak_memory
from bge_m3_server.adapters.memory.trim import trim_heap
from bge_m3_server.adapters.ort.session import OrtBackend, SessionSettings, session_options
from bge_m3_server.app.config import load_config
from bge_m3_server.app.container import build_container
from bge_m3_server.app.metering import MeteredBackend, PassMeter, ProbeMeter
from bge_m3_server.domain.budget import conservative_coefficients
from bge_m3_server.domain.ports import InferenceBackend
from bge_m3_server.domain.probe import Probe, ProbeLimits, probe_shapes
from bge_m3_server.domain.probe_fit import FitRefusal, ShapePeak, fit_workspace
from bge_m3_server.domain.types import GraphLayout, HeadProjections, Heads, ModelContract

MIB = 2**20
UNSEEN_SHAPES = ((12, 150), (3, 700), (2, 3000))

CONTRACT = ModelContract(
    layout=GraphLayout.SENTENCE_AND_TOKENS,
    input_names=("input_ids", "attention_mask"),
    outputs_by_head={Heads.DENSE: "sentence_embedding", Heads.SPARSE: "token_embeddings"},
    hidden_size=1024,
    max_tokens=8192,
    attention_heads=16,
)


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ep", default="openvino", help="as BGE_M3_EP")
    parser.add_argument("--model", default="w8", help="as BGE_M3_MODEL")
    parser.add_argument("--cache", type=Path, default=Path(".cache/synthetic/prepared"))
    parser.add_argument(
        "--arena", action="store_true", help="fp32 on ONNX Runtime that keeps what it frees"
    )
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--memory-mib", type=int, default=12_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    meter = meter_of(arguments)
    conservative = conservative_coefficients(meter.backend.contract)
    limit_bytes = arguments.memory_mib * MIB
    result = Probe(
        probe_shapes(arguments.max_tokens, conservative),
        meter,
        conservative,
        ProbeLimits(
            memory_bytes=limit_bytes,
            workspace_bytes=limit_bytes,
            shape_seconds=240.0,
            total_seconds=900.0,
        ),
        time.monotonic,
        threading.Event().is_set,
        time.sleep,
    ).run()
    print(f"{result.outcome.value}: {result.reason}")
    for skipped in result.skipped:
        print(f"skipped {skipped.shape}: {skipped.reason}")
    fit = fit_workspace(result.peaks, conservative, arguments.max_tokens)
    if isinstance(fit, FitRefusal):
        sys.exit(fit.reason)
    print(f"{fit.coefficients}\n{fit.quality}\nconservative: {conservative}")

    # In a process that ran nothing else, the smallest first: what is kept of other passes counts.
    with multiprocessing.get_context("spawn").Pool(1) as process:
        unseen = process.apply(measured_unseen, (arguments,))
    print("\n| shape | peak MiB | estimate MiB | error | conservative MiB | seconds |")
    print("|---|---|---|---|---|---|")
    for peak in (*result.peaks, *unseen):
        estimate = fit.coefficients.cost_bytes(peak.batch, peak.tokens)
        untold = conservative.cost_bytes(peak.batch, peak.tokens)
        note = " (unseen)" if peak in unseen else ""
        print(
            f"| {peak.batch}x{peak.tokens}{note} | {peak.peak_bytes / MIB:.0f} "
            f"| {estimate / MIB:.0f} | {estimate / peak.peak_bytes - 1:+.1%} "
            f"| {untold / MIB:.0f} | {peak.seconds:.1f} |"
        )
    if arguments.json:
        figures = {
            "conditions": {
                "cpu": cpu_model(),
                "threads": cpu_count().count,
                "engine": f"{arguments.ep}, onnxruntime {onnxruntime.__version__}",
                "model": arguments.model,
                "arena": arguments.arena,
                "python": platform.python_version(),
            },
            "conservative": attrs.asdict(conservative),
            "fit": attrs.asdict(fit),
            "peaks": [attrs.asdict(peak) for peak in result.peaks],
            "unseen": [attrs.asdict(peak) for peak in unseen],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def meter_of(arguments: argparse.Namespace) -> ProbeMeter:
    """The engine, and what reads its peaks."""
    memory = peak_memory()
    if isinstance(memory, str):
        sys.exit(memory)
    backend = backend_with_arena(arguments) if arguments.arena else served_backend(arguments)
    return ProbeMeter(backend, PassMeter(memory), trim_heap)


def measured_unseen(arguments: argparse.Namespace) -> list[ShapePeak]:
    """Peaks of the shapes that the probe leaves out."""
    meter, peaks = meter_of(arguments), []
    meter.warm_up()
    for batch, tokens in UNSEEN_SHAPES:
        started = time.monotonic()
        peak_bytes = meter.peak_bytes(batch, tokens)
        if peak_bytes is not None:
            peaks.append(ShapePeak(batch, tokens, peak_bytes, time.monotonic() - started))
    return peaks


def served_backend(arguments: argparse.Namespace) -> InferenceBackend:
    """The engine that the server would use."""
    settings = {
        "BGE_M3_MODEL_DIR": str(arguments.directory),
        "BGE_M3_CACHE_DIR": str(arguments.cache),
        "BGE_M3_EP": arguments.ep,
        "BGE_M3_MODEL": arguments.model,
    }
    backend = build_container(load_config(settings, sys.platform)).load_model().backends[0]
    return backend.backend if isinstance(backend, MeteredBackend) else backend


def backend_with_arena(arguments: argparse.Namespace) -> InferenceBackend:
    """The exported graph with the engine's own allocator, which the server does without."""
    options = session_options(SessionSettings(cpu_count().count, Path("unused")), has_arena=True)
    options.enable_mem_pattern = True
    graph = str(arguments.directory / "onnx" / "model.onnx")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return OrtBackend(CONTRACT, HeadProjections(), session)


if __name__ == "__main__":
    main()

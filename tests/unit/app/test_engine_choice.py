"""Which engine the container takes, how many workers it gets, and what takes its place."""

import logging
import platform

import attrs
import numpy as np
import pytest
from bge_m3_server.adapters.memory.cpu_count import cpu_count
from bge_m3_server.adapters.models.files import ModelFiles
from bge_m3_server.adapters.openvino.choice import prefers_openvino, usable_flags
from bge_m3_server.adapters.openvino.package import is_installed
from bge_m3_server.adapters.processor import read_cpu_flags
from bge_m3_server.app.config import ExecutionProvider, load_config
from bge_m3_server.app.container.engines import (
    CPUS_PER_WORKER,
    engine_for,
    fallback_of,
    settle,
    worker_count,
)
from bge_m3_server.app.container.preparation import (
    engine_flags,
    is_prepared,
    rounding_environment,
)
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.types import GpuDevice, HeadProjections

from tests.support.graphs import texts
from tests.support.openvino_mark import needs_openvino
from tests.support.tiny_models import write_tiny_model

CPU_ENGINES = {ExecutionProvider.CPU, ExecutionProvider.OPENVINO}


@attrs.frozen
class Gpus:
    """So many devices."""

    count: int = 0

    def devices(self):
        return tuple(map(GpuDevice, range(self.count)))


def config(**environment):
    return load_config(environment, "linux")


def chosen_by_rule(provider):
    return attrs.evolve(
        config(), execution_provider=provider, execution_provider_reason="auto: because"
    )


def test_auto_is_settled_by_the_rule():
    """What the rule says of this machine is taken, and its reason kept for the log."""
    preference = prefers_openvino(
        is_installed=is_installed(),
        architecture=platform.machine(),
        cpu_flags=read_cpu_flags(),
    )

    settled = settle(config())

    assert settled.execution_provider in CPU_ENGINES
    assert (settled.execution_provider is ExecutionProvider.OPENVINO) is preference.is_preferred
    assert settled.execution_provider_reason == f"auto: {preference.reason}"


@pytest.mark.parametrize(
    "provider", [each.value for each in ExecutionProvider if each is not ExecutionProvider.AUTO]
)
def test_an_engine_that_was_named_is_kept(provider):
    """The rule chooses only where nobody else did."""
    named = config(BGE_M3_EP=provider)

    assert settle(named) == named
    assert fallback_of(named) is None


def test_an_engine_chosen_by_rule_gives_way_to_onnx_runtime():
    """All other settings stay."""
    chosen = chosen_by_rule(ExecutionProvider.OPENVINO)

    assert fallback_of(chosen) == attrs.evolve(chosen, execution_provider=ExecutionProvider.CPU)


def test_nothing_takes_the_place_of_onnx_runtime():
    """When the plain engine fails, there is none to fall back to."""
    assert fallback_of(chosen_by_rule(ExecutionProvider.CPU)) is None


@pytest.mark.parametrize(
    ("provider", "model", "flags", "expected"),
    [
        ("cpu", "auto", "avx2 avx512_vnni", True),
        ("cpu", "auto", "asimddp", True),
        ("cpu", "auto", "avx2", False),
        ("cpu", "w8", "avx2", True),
        ("cpu", "fp32", "avx512_vnni", False),
        ("openvino", "auto", "avx2 avx_vnni", True),
        ("openvino", "auto", "avx2", False),
        ("openvino", "w8", "avx2", True),
        ("openvino", "fp32", "avx2", False),
        ("cuda", "auto", "avx512_vnni", False),
        ("coreml", "auto", "", False),
    ],
)
def test_eight_bits_are_served_where_they_are_faster(provider, model, flags, expected, tmp_path):
    """Or where somebody asks for them."""
    files = ModelFiles("bge-m3", tmp_path / "model.onnx", tmp_path / "tokenizer.json")

    chosen = config(BGE_M3_EP=provider, BGE_M3_MODEL=model)

    assert is_prepared(chosen, files, flags.split()) is expected
    half = attrs.evolve(files, precision="fp16")
    assert is_prepared(chosen, half, flags.split()) is (model == "w8")


def test_a_mask_counts_for_the_engine_that_obeys_it():
    """oneDNN's, which is in OpenVINO alone."""
    flags = read_cpu_flags()

    assert engine_flags(config(BGE_M3_EP="openvino")) == flags
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        mask = {name: "sse41"}
        assert engine_flags(config(BGE_M3_EP="cpu", **mask)) == flags
        masked = engine_flags(config(BGE_M3_EP="openvino", **mask))
        assert masked == usable_flags(flags, "SSE41")
        assert masked != flags or "avx2" not in flags


def test_instructions_that_matter_make_another_environment():
    """A verdict on how a model rounds holds for those that multiply, whatever else there is."""
    wide = rounding_environment("1.0", ["sse4_2", "avx2", "avx512_vnni"])

    assert wide == f"1.0 {platform.machine()} avx2 avx512_vnni"
    assert wide == rounding_environment("1.0", ["avx512_vnni", "avx2", "sha_ni"])
    assert wide != rounding_environment("1.0", ["avx2"])
    assert wide != rounding_environment("1.1", ["avx2", "avx512_vnni"])


@needs_openvino
@pytest.mark.parametrize("model", ["auto", "w8", "fp32"])
def test_a_model_in_full_precision_is_computed_so(model, tmp_path):
    """Nothing checks what bfloat16 does to it, whatever was asked for before it was served."""
    graph = write_tiny_model(tmp_path)
    batch = pad(texts(5, 30))
    outputs = [
        engine_for(config(BGE_M3_EP=provider, BGE_M3_MODEL=model), threads=1, workers=1)
        .load(graph, HeadProjections(), 0, None)
        .run(batch, ["sentence_embedding"])["sentence_embedding"]
        for provider in ("openvino", "cpu")
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


def test_a_cpu_has_a_worker_for_every_eight_processors():
    """One at least, and one more for a rest."""
    cpus = cpu_count().count

    workers = worker_count(config(BGE_M3_EP="cpu"), Gpus())

    assert (workers - 1) * CPUS_PER_WORKER < cpus <= workers * CPUS_PER_WORKER


@pytest.mark.parametrize("provider", ["cpu", "openvino", "coreml"])
def test_workers_that_were_asked_for_on_a_cpu(provider):
    """Any number is obeyed, whatever devices there are."""
    assert worker_count(config(BGE_M3_EP=provider, BGE_M3_WORKERS="5"), Gpus(2)) == 5


@pytest.mark.parametrize(
    ("devices", "environment", "expected"),
    [
        (0, {}, 1),
        (3, {}, 3),
        (3, {"BGE_M3_GPU_COUNT": "2"}, 2),
        (3, {"BGE_M3_WORKERS": "2"}, 2),
    ],
)
def test_a_gpu_has_one_worker_per_device(devices, environment, expected, caplog):
    """Fewer may be asked for; where no device is seen, one is assumed."""
    assert worker_count(config(BGE_M3_EP="cuda", **environment), Gpus(devices)) == expected
    assert caplog.records == []


def test_more_workers_than_devices_are_too_many(caplog):
    """They are cut to the devices, and the log says so."""
    caplog.set_level(logging.WARNING)

    assert worker_count(config(BGE_M3_EP="tensorrt", BGE_M3_WORKERS="4"), Gpus(2)) == 2

    assert [record.fields for record in caplog.records] == [{"requested": 4, "clamped": 2}]

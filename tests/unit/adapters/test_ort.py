"""ONNX Runtime sessions: their options and providers, and how failures to load are told."""

import gc
import weakref

import numpy as np
import onnx
import onnxruntime
import pytest
from bge_m3_server.adapters.memory.peak import peak_memory
from bge_m3_server.adapters.memory.trim import trim_heap
from bge_m3_server.adapters.ort.coreml import coreml_providers
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.cuda import cuda_providers
from bge_m3_server.adapters.ort.session import (
    OrtBackend,
    Provider,
    SessionSettings,
    load_backend,
    open_session,
    require_providers,
    session_options,
)
from bge_m3_server.adapters.ort.tensorrt import tensorrt_providers
from bge_m3_server.adapters.processor import has_int8_products, read_cpu_flags
from bge_m3_server.app.metering import probe_batch
from bge_m3_server.domain.errors import CacheDirectoryError, ModelError, ProviderError
from bge_m3_server.domain.types import HeadProjections
from onnx import TensorProto, helper, numpy_helper

from tests.support.tiny_models import write_tiny_model

CPU = [Provider("CPUExecutionProvider")]


@pytest.fixture
def settings(tmp_path):
    return SessionSettings(intra_threads=1, cache_dir=tmp_path / "cache")


def test_closed_backend_lets_go_of_its_session(tmp_path, settings):
    """Closing frees the session."""
    graph = write_tiny_model(tmp_path)
    loaded = load_backend(graph, HeadProjections(), settings, CPU)
    session = open_session(graph, settings, CPU)
    backend = OrtBackend(loaded.contract, loaded.projections, session)
    alive = weakref.ref(session)
    del session
    backend.close()
    gc.collect()
    assert alive() is None


def test_session_options_are_explicit(settings):
    """Threads as configured, sequential, fully optimised, no spinning."""
    options = session_options(
        SessionSettings(intra_threads=3, cache_dir=settings.cache_dir), has_arena=False
    )
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 1
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    for pool in ("intra_op", "inter_op"):
        assert options.get_session_config_entry(f"session.{pool}.allow_spinning") == "0"


def test_int8_products_do_not_overflow(tmp_path):
    """Also on a processor without instructions for them, where usual kernels add in 16 bits."""
    weight = numpy_helper.from_array(np.full((64, 8), 127, np.int8), "weight")
    product = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "weight"], ["out"])],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, ["rows", 64])],
        [helper.make_tensor_value_info("out", TensorProto.INT32, ["rows", 8])],
        [weight],
    )
    graph = tmp_path / "model.onnx"
    onnx.save(
        helper.make_model(product, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), graph
    )
    of_this_processor = SessionSettings(
        1, tmp_path, has_int8_products=has_int8_products(read_cpu_flags())
    )

    for settings in (of_this_processor, SessionSettings(1, tmp_path)):
        session = open_session(graph, settings, CPU)
        (found,) = session.run(None, {"a": np.full((4, 64), 255, np.uint8)})
        assert (found == 64 * 127 * 255).all()


def test_fast_int8_kernels_stay_where_they_are_exact(tmp_path):
    """Only a processor without such instructions pays for products that do not overflow."""
    exact = session_options(SessionSettings(1, tmp_path), has_arena=False)
    assert exact.get_session_config_entry("session.x64quantprecision") == "1"
    fast = session_options(SessionSettings(1, tmp_path, has_int8_products=True), has_arena=False)
    with pytest.raises(RuntimeError, match="x64quantprecision"):
        fast.get_session_config_entry("session.x64quantprecision")


def test_a_large_pass_leaves_nothing_behind(tmp_path, settings):
    """Its scores took 64 MiB and more, and the arena gives them back as soon as it ends."""
    memory = peak_memory()
    if isinstance(memory, str):
        pytest.skip(memory)
    graph = write_tiny_model(tmp_path, positions=1026)
    backend = load_backend(graph, HeadProjections(), settings, cpu_providers(settings))
    outputs = backend.contract.outputs_for(backend.contract.heads)
    backend.run(probe_batch(1, 8), outputs)
    trim_heap()
    before = memory.resident().anonymous_bytes
    memory.reset_peak()
    backend.run(probe_batch(16, 1024), outputs)
    peak = memory.peak_bytes()
    trim_heap()

    assert peak - before > 64 * 2**20
    assert memory.resident().anonymous_bytes - before < 16 * 2**20


def test_zero_threads_are_refused(tmp_path):
    """Zero would let the engine pin one thread to each core."""
    with pytest.raises(ValueError, match="intra_threads"):
        SessionSettings(intra_threads=0, cache_dir=tmp_path)


def test_cpu_provider(settings):
    """The CPU stands alone."""
    assert [provider.name for provider in cpu_providers(settings)] == ["CPUExecutionProvider"]


def test_cuda_providers(tmp_path):
    """CUDA has its device and, if one is set, its memory limit; the CPU is behind it."""
    plain = cuda_providers(SessionSettings(1, tmp_path, device_id=2))
    assert [provider.name for provider in plain] == [
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    ]
    assert plain[0].options == {"device_id": "2"}
    limited = cuda_providers(SessionSettings(1, tmp_path, gpu_mem_limit_bytes=4 << 30))
    assert limited[0].options == {"device_id": "0", "gpu_mem_limit": "4294967296"}


def test_tensorrt_providers(tmp_path):
    """TensorRT keeps engines and timings in the cache and has CUDA, then the CPU, behind it."""
    settings = SessionSettings(
        1, tmp_path, device_id=1, gpu_mem_limit_bytes=7, trt_max_workspace_bytes=9
    )
    tensorrt, cuda, cpu = tensorrt_providers(settings)
    engines, timing = tmp_path / "trt-engines", tmp_path / "trt-timing"
    assert tensorrt.name == "TensorrtExecutionProvider"
    assert tensorrt.options == {
        "device_id": "1",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(engines),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(timing),
        "trt_fp16_enable": "True",
        "trt_max_workspace_size": "9",
    }
    assert tensorrt.directories == (engines, timing)
    assert [cuda, cpu] == cuda_providers(settings)
    without_limit, *_ = tensorrt_providers(SessionSettings(1, tmp_path))
    assert "trt_max_workspace_size" not in without_limit.options


@pytest.mark.parametrize("strategy", ["FastPrediction", "Default"])
def test_coreml_providers(tmp_path, strategy):
    """Core ML gets the program format, the strategy and a directory for compiled models."""
    coreml, cpu = coreml_providers(SessionSettings(1, tmp_path, coreml_strategy=strategy))
    assert coreml.name == "CoreMLExecutionProvider"
    assert coreml.options == {
        "ModelFormat": "MLProgram",
        "SpecializationStrategy": strategy,
        "ModelCacheDirectory": str(tmp_path / "coreml"),
    }
    assert coreml.directories == (tmp_path / "coreml",)
    assert cpu.name == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("providers", "hint"),
    [
        (cuda_providers, "pip install --force-reinstall onnxruntime-gpu"),
        (tensorrt_providers, "pip install --force-reinstall onnxruntime-gpu"),
        (coreml_providers, "macOS"),
    ],
)
def test_provider_that_is_not_installed(tmp_path, settings, capsys, providers, hint):
    """The start stops with what was asked for, what there is and how to get it."""
    asked = providers(settings)
    available = onnxruntime.get_available_providers()
    if asked[0].name in available:
        pytest.skip(f"this onnxruntime has {asked[0].name}")
    with pytest.raises(ProviderError) as caught:
        open_session(write_tiny_model(tmp_path), settings, asked)
    for word in (asked[0].name, *available, hint):
        assert word in str(caught.value)
    assert capsys.readouterr().out == ""


def test_provider_that_the_session_did_not_activate(settings):
    """A provider that is installed but did not start is as good as missing."""
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider was asked .* CPUExecution"):
        require_providers(cuda_providers(settings), ["CPUExecutionProvider"], "the session has")


def test_compile_caches_are_created(tmp_path, settings):
    """A provider finds the directories it compiles into, parents included."""
    directory = tmp_path / "cache" / "compiled"
    provider = Provider("CPUExecutionProvider", directories=(directory,))
    open_session(write_tiny_model(tmp_path), settings, [provider])
    assert directory.is_dir()


def test_compile_cache_that_cannot_be_created(tmp_path, settings):
    """The message names the directory."""
    (tmp_path / "cache").write_text("a file is in the way")
    directory = tmp_path / "cache" / "compiled"
    provider = Provider("CPUExecutionProvider", directories=(directory,))
    with pytest.raises(CacheDirectoryError, match=str(directory)):
        open_session(write_tiny_model(tmp_path), settings, [provider])


def test_failed_load_is_not_tried_again_on_another_provider(tmp_path, settings, capfd):
    """Onnxruntime's own fallback, which prints to standard output, is off."""
    graph = write_tiny_model(tmp_path)
    no_text = b"LayerNorm" + b"\xff" * len("alization")
    graph.write_bytes(graph.read_bytes().replace(b"LayerNormalization", no_text))
    with pytest.raises(ModelError, match=r"model\.onnx"):
        open_session(graph, settings, CPU)
    assert capfd.readouterr().out == ""

"""ONNX Runtime sessions: what is fed, what is computed, and how failures are told."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
from bge_m3_server.adapters.models.torch_weights import read_linear
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
from bge_m3_server.domain.embedder import NoTelemetry, embed_chunk, pad
from bge_m3_server.domain.errors import (
    CacheDirectoryError,
    ContractError,
    CorruptFileError,
    InferenceError,
    ModelError,
    ProviderError,
)
from bge_m3_server.domain.types import HeadProjections, Heads, TokenizedText
from onnx import TensorProto, helper, numpy_helper

from tests.support.tiny_models import write_tiny_model

LAYOUTS = ["sentence_and_tokens", "last_hidden_state", "ready_heads"]
ALL_HEADS = Heads.DENSE | Heads.SPARSE | Heads.COLBERT
CPU = [Provider("CPUExecutionProvider")]


@pytest.fixture
def settings(tmp_path):
    return SessionSettings(intra_threads=1, cache_dir=tmp_path / "cache")


def texts(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return [TokenizedText(np.array([0, *rng.integers(4, 60, length - 2), 2])) for length in lengths]


def tiny_backend(directory, settings, layout="sentence_and_tokens", **changes):
    graph = write_tiny_model(directory, layout, **changes)
    heads = HeadProjections(
        sparse=read_linear(directory / "sparse_linear.pt"),
        colbert=read_linear(directory / "colbert_linear.pt"),
    )
    return load_backend(graph, heads, settings, CPU)


def write_graph(path, inputs, nodes, outputs, initializers=()):
    """A graph of int64 (batch, seq) inputs and float outputs of the given shapes."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "s"]) for name in inputs],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in outputs.items()
        ],
        list(initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def echo_graph(path, inputs):
    """A graph whose last_hidden_state holds, per token, the value of each input."""
    last = numpy_helper.from_array(np.array([-1]), "last")
    nodes = []
    for name in inputs:
        nodes += [
            helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", [f"{name}.float", "last"], [f"{name}.column"]),
        ]
    columns = [f"{name}.column" for name in inputs]
    nodes.append(helper.make_node("Concat", columns, ["last_hidden_state"], axis=-1))
    return write_graph(path, inputs, nodes, {"last_hidden_state": ["b", "s", len(inputs)]}, [last])


def failing_graph(path):
    """A graph that loads but looks up a row beyond its table whenever it runs."""
    initializers = [
        numpy_helper.from_array(np.array(9), "beyond"),
        numpy_helper.from_array(np.array([1]), "axis"),
        numpy_helper.from_array(np.ones((1, 3), np.float32), "table"),
    ]
    nodes = [
        helper.make_node("Add", ["attention_mask", "beyond"], ["places"]),
        helper.make_node("Gather", ["table", "places"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "axis"], ["dense_vecs"], keepdims=0),
    ]
    inputs = ["input_ids", "attention_mask"]
    return write_graph(path, inputs, nodes, {"dense_vecs": ["b", 3]}, initializers)


def embed(backend, batch_of_texts, heads=ALL_HEADS):
    return embed_chunk(batch_of_texts, heads, backend, NoTelemetry())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_embeddings(tmp_path, settings, layout, precision):
    """One set of weights embeds alike in every layout and precision."""
    reference = embed(tiny_backend(tmp_path / "reference", settings), texts(9, 5))
    backend = tiny_backend(tmp_path / "other", settings, layout, precision=precision)
    assert backend.contract.precision == precision
    for expected, actual in zip(reference, embed(backend, texts(9, 5)), strict=True):
        np.testing.assert_allclose(actual.dense, expected.dense, atol=1e-5)
        np.testing.assert_allclose(actual.colbert, expected.colbert, atol=1e-5)
        np.testing.assert_array_equal(actual.sparse.indices, expected.sparse.indices)
        np.testing.assert_allclose(actual.sparse.values, expected.sparse.values, atol=1e-5)


def test_external_data_is_found_beside_the_graph(tmp_path, settings):
    """Weights in files of their own load like weights in the graph."""
    inside = embed(tiny_backend(tmp_path / "inside", settings), texts(6))
    outside = embed(tiny_backend(tmp_path / "outside", settings, external_data=True), texts(6))
    np.testing.assert_array_equal(outside[0].dense, inside[0].dense)


def test_only_the_outputs_asked_for_are_returned(tmp_path, settings):
    """A dense request gets the dense output and nothing else."""
    backend = tiny_backend(tmp_path, settings, "ready_heads")
    batch = pad(texts(4, 6))
    assert list(backend.run(batch, backend.contract.outputs_for(Heads.DENSE))) == ["dense_vecs"]
    assert list(backend.run(batch, ["colbert_vecs", "dense_vecs"])) == [
        "colbert_vecs",
        "dense_vecs",
    ]
    assert backend.run(batch, []) == {}


def test_engine_failure_tells_the_shape_and_keeps_the_cause(tmp_path, settings):
    """The log gets the batch's shape and the engine's own words; the backend lives on."""
    backend = load_backend(failing_graph(tmp_path / "graph.onnx"), HeadProjections(), settings, CPU)
    for _ in range(2):
        with pytest.raises(InferenceError, match=r"shape \(2, 7\): .*Gather") as caught:
            backend.run(pad(texts(4, 7)), ["dense_vecs"])
        assert caught.value.__cause__ is not None
        assert not isinstance(caught.value.__cause__, InferenceError)


def test_inputs_are_fed_as_the_graph_asks(tmp_path, settings):
    """Token types are zeros; positions count real tokens from 2 and give padding 1."""
    names = ["input_ids", "attention_mask", "token_type_ids", "position_ids"]
    graph = echo_graph(tmp_path / "graph.onnx", names)
    backend = load_backend(graph, HeadProjections(), settings, CPU)
    batch = pad(texts(3, 5))
    echoed = backend.run(batch, ["last_hidden_state"])["last_hidden_state"]
    ids, mask, token_types, positions = np.moveaxis(echoed, -1, 0)
    np.testing.assert_array_equal(ids, batch.ids)
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(token_types, np.zeros((2, 5)))
    np.testing.assert_array_equal(positions, [[2, 3, 4, 1, 1], [2, 3, 4, 5, 6]])


@pytest.mark.parametrize("asked", [False, True])
def test_token_types_are_fed_only_if_asked_for(tmp_path, settings, asked):
    """Both exports run; onnxruntime refuses an input that the graph does not have."""
    backend = tiny_backend(tmp_path, settings, ask_for_token_types=asked)
    assert ("token_type_ids" in backend.contract.input_names) is asked
    assert np.isfinite(embed(backend, texts(5))[0].dense).all()


def test_parallel_runs_give_equal_results(tmp_path, settings):
    """Threads that share one session get what a single thread gets."""
    backend = tiny_backend(tmp_path, settings)
    batches = [pad(texts(length, length + 3)) for length in range(3, 23)]
    names = ["sentence_embedding", "token_embeddings"]
    alone = [backend.run(batch, names) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda batch: backend.run(batch, names), batches * 3))
    for expected, actual in zip(alone * 3, together, strict=True):
        for name in names:
            np.testing.assert_array_equal(actual[name], expected[name])


def test_closed_backend_lets_go_of_its_session(tmp_path, settings):
    """Closing frees the session, and running afterwards says what happened."""
    loaded = tiny_backend(tmp_path, settings)
    session = open_session(tmp_path / "onnx" / "model.onnx", settings, CPU)
    backend = OrtBackend(loaded.contract, loaded.projections, session)
    alive = weakref.ref(session)
    del session
    backend.close()
    gc.collect()
    assert alive() is None
    with pytest.raises(InferenceError, match="closed"):
        backend.run(pad(texts(3)), ["sentence_embedding"])
    backend.close()


def test_session_options_are_explicit(settings):
    """Threads as configured, sequential, fully optimised, no spinning."""
    options = session_options(SessionSettings(intra_threads=3, cache_dir=settings.cache_dir))
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 1
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    for pool in ("intra_op", "inter_op"):
        assert options.get_session_config_entry(f"session.{pool}.allow_spinning") == "0"


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


def test_missing_graph(tmp_path, settings):
    """A graph that is not there is named."""
    with pytest.raises(ModelError, match=r"nowhere\.onnx"):
        open_session(tmp_path / "nowhere.onnx", settings, CPU)


def with_broken_input(model):
    """The model with an endless name in the description of its input, which loading reads."""
    head, name, tail = model.rpartition(b"\x0a\x0eattention_mask")
    return head + b"\x0a\x7f" + name[2:] + tail


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: model[: len(model) // 2],
        lambda model: b"<html>not found</html>",
        with_broken_input,
    ],
    ids=["truncated", "no model", "broken inside"],
)
def test_damaged_graph(tmp_path, settings, damage):
    """A damaged file is refused by name."""
    graph = write_tiny_model(tmp_path)
    graph.write_bytes(damage(graph.read_bytes()))
    with pytest.raises(CorruptFileError, match=r"model\.onnx"):
        open_session(graph, settings, CPU)


def test_missing_external_data(tmp_path, settings):
    """A weights file that is missing beside the graph is named."""
    graph = write_tiny_model(tmp_path, external_data=True)
    (graph.parent / "model.onnx_data").unlink()
    with pytest.raises(CorruptFileError, match=r"model\.onnx_data"):
        open_session(graph, settings, CPU)


def test_graph_that_the_engine_cannot_run(tmp_path, settings):
    """An operator that this engine does not know stops the start with the engine's words."""
    graph = write_graph(
        tmp_path / "graph.onnx",
        ["input_ids"],
        [helper.make_node("NoSuchOperator", ["input_ids"], ["dense_vecs"])],
        {"dense_vecs": ["b", 3]},
    )
    with pytest.raises(ModelError, match="NoSuchOperator") as caught:
        open_session(graph, settings, CPU)
    assert "graph.onnx" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_failed_load_is_not_tried_again_on_another_provider(tmp_path, settings, capfd):
    """Onnxruntime's own fallback, which prints to standard output, is off."""
    graph = write_tiny_model(tmp_path)
    no_text = b"LayerNorm" + b"\xff" * len("alization")
    graph.write_bytes(graph.read_bytes().replace(b"LayerNormalization", no_text))
    with pytest.raises(ModelError, match=r"model\.onnx"):
        open_session(graph, settings, CPU)
    assert capfd.readouterr().out == ""


def test_graph_of_no_known_layout(tmp_path, settings):
    """A graph that runs but promises nothing known is refused."""
    graph = echo_graph(tmp_path / "graph.onnx", ["input_ids"])
    with pytest.raises(ContractError):
        load_backend(graph, HeadProjections(), settings, CPU)

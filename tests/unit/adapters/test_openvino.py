"""OpenVINO: its own format, its options, its absence; what it shares is in `test_backends`."""

import importlib
import importlib.machinery
import os
import resource
import signal
import subprocess
import sys
import types

import numpy as np
import onnx
import pytest
from bge_m3_server.adapters.models.onnx_file import TensorInfo
from bge_m3_server.adapters.openvino.backend import (
    OpenVinoSettings,
    compile_options,
    load_openvino_backend,
)
from bge_m3_server.adapters.openvino.choice import prefers_openvino, usable_flags
from bge_m3_server.adapters.openvino.ir import describe_ir, write_ir
from bge_m3_server.adapters.openvino.links import without_links
from bge_m3_server.adapters.openvino.package import engine_version, import_openvino, is_installed
from bge_m3_server.adapters.ort.cpu import cpu_providers
from bge_m3_server.adapters.ort.session import SessionSettings, load_backend
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.errors import (
    CacheDirectoryError,
    CorruptFileError,
    EngineError,
    InferenceError,
    ProviderError,
)
from bge_m3_server.domain.types import HeadProjections

from tests.support.eight_bit import write_eight_bit
from tests.support.graphs import graph_for_texts_of, texts
from tests.support.openvino_mark import needs_openvino
from tests.support.tiny_models import write_tiny_model

EXACT = OpenVinoSettings(intra_threads=1, precision_hint="f32")
METADATA = {
    "bge_m3_server.max_tokens": "60",
    "bge_m3_server.attention_heads": "4",
    "other": "<&>\"' é",
}


def load_exact(graph):
    return load_openvino_backend(graph, HeadProjections(), EXACT)


def load_on_ort(graph, directory):
    settings = SessionSettings(intra_threads=1, cache_dir=directory)
    return load_backend(graph, HeadProjections(), settings, cpu_providers(settings))


def sentences(backend, *lengths):
    return backend.run(pad(texts(*lengths)), ["sentence_embedding"])["sentence_embedding"]


def lowest_cosine(left, right):
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(((left * right).sum(axis=1) / norms).min())


@needs_openvino
def test_float32_gives_the_vectors_of_onnx_runtime(tmp_path):
    """Where nothing is rounded, the engines agree on batches with and without padding."""
    graph = write_tiny_model(tmp_path)
    ours, theirs = load_exact(graph), load_on_ort(graph, tmp_path)
    for lengths in ((5,), (7, 7), (3, 40, 64)):
        assert lowest_cosine(sentences(ours, *lengths), sentences(theirs, *lengths)) > 0.99999


@needs_openvino
@pytest.mark.parametrize("layout", ["sentence_and_tokens", "last_hidden_state", "ready_heads"])
def test_ir_promises_what_its_source_does(tmp_path, layout):
    """The contract of a converted model is that of the ONNX file, with the metadata's figures."""
    source = write_tiny_model(tmp_path, layout, precision="fp16", ask_for_token_types=True)
    expected = load_exact(source).contract
    assert (expected.max_tokens, expected.attention_heads) == (64, None)

    write_ir(source, tmp_path / "model.xml", METADATA)
    found = load_exact(tmp_path / "model.xml").contract

    assert (found.max_tokens, found.attention_heads) == (60, 4)
    for field in ("layout", "input_names", "outputs_by_head", "hidden_size", "precision"):
        assert getattr(found, field) == getattr(expected, field)


@needs_openvino
def test_ir_keeps_metadata_and_names_of_weights(tmp_path):
    """Any value survives; weights are found under their names with their shapes."""
    write_ir(write_tiny_model(tmp_path), tmp_path / "model.xml", METADATA)
    model = import_openvino().Core().read_model(tmp_path / "model.xml")

    description = describe_ir(model)

    assert description.metadata == METADATA
    (positions,) = (
        info for name, info in description.initializers.items() if "position_embeddings" in name
    )
    assert positions == TensorInfo((66, 16), "float16")


@needs_openvino
def test_ir_without_metadata(tmp_path):
    """The limit is read from the position table then."""
    write_ir(write_tiny_model(tmp_path), tmp_path / "model.xml", {})
    assert load_exact(tmp_path / "model.xml").contract.max_tokens == 64


@needs_openvino
def test_ir_gives_the_vectors_of_its_source(tmp_path):
    """Weights that float16 holds come through conversion unchanged, external ones as well."""
    source = write_tiny_model(tmp_path, external_data=True)
    write_ir(source, tmp_path / "model.xml", {})
    converted = sentences(load_exact(tmp_path / "model.xml"), 5, 30)
    assert lowest_cosine(converted, sentences(load_exact(source), 5, 30)) > 0.999999


@needs_openvino
@pytest.mark.parametrize("hidden", [128, 256])
def test_eight_bit_weights_stay_so_and_compute_right(tmp_path, hidden):
    """Block-wise 8-bit weights take a byte each in the IR and give ONNX Runtime's vectors."""
    source = write_tiny_model(tmp_path, hidden=hidden)
    quantised = write_eight_bit(source, tmp_path / "w8.onnx")
    exact = sentences(load_on_ort(source, tmp_path), 5, 30)
    theirs = sentences(load_on_ort(quantised, tmp_path), 5, 30)

    write_ir(quantised, tmp_path / "w8.xml", {})

    matrix_bytes = 3 * hidden * hidden
    rest_bytes = 2 * (64 + 66) * hidden + 4 * matrix_bytes // 128
    assert (tmp_path / "w8.bin").stat().st_size < matrix_bytes + rest_bytes + 20_000
    for graph in (quantised, tmp_path / "w8.xml"):
        ours = load_exact(graph)
        assert lowest_cosine(sentences(ours, 5, 30), theirs) > 0.9995
        assert lowest_cosine(sentences(ours, 5, 30), exact) > 0.9995
    assert ours.contract.precision == "int8"


@needs_openvino
@pytest.mark.parametrize(
    "damage",
    [
        lambda xml, weights: xml.write_bytes(xml.read_bytes()[: xml.stat().st_size // 2]),
        lambda xml, weights: xml.write_text("<net>"),
        lambda xml, weights: weights.unlink(),
        lambda xml, weights: weights.write_bytes(weights.read_bytes()[:100]),
    ],
    ids=["half a graph", "no graph", "no weights", "few weights"],
)
def test_damaged_ir(tmp_path, damage):
    """An IR whose files are damaged is refused by name."""
    xml = tmp_path / "model.xml"
    write_ir(write_tiny_model(tmp_path), xml, {})
    damage(xml, xml.with_suffix(".bin"))
    with pytest.raises(CorruptFileError, match=r"model\.xml or a file beside it is damaged"):
        load_exact(xml)


@needs_openvino
def test_ir_that_cannot_be_written(tmp_path):
    """The cache is to blame, so that the model can be served as it is; the message names both."""
    source = write_tiny_model(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(
        CacheDirectoryError, match=r"cannot write .*file/model\.xml .*BGE_M3_CACHE_DIR"
    ):
        write_ir(source, tmp_path / "file" / "model.xml", {})


@needs_openvino
def test_a_full_disk_is_one_of_the_cache(tmp_path):
    """Wherever in the files the room ends."""
    source = write_tiny_model(tmp_path)
    write_ir(source, tmp_path / "whole.xml", {})
    size = (tmp_path / "whole.bin").stat().st_size

    def write_with_a_limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        try:
            write_ir(source, tmp_path / "model.xml", {})
        except CacheDirectoryError:
            os._exit(0)
        os._exit(1)

    child = os.fork()
    if child == 0:
        write_with_a_limit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_openvino
def test_a_graph_that_only_others_can_read(tmp_path):
    """An operator that OpenVINO lacks is no fault of the model: another engine may take it."""
    path = write_tiny_model(tmp_path)
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "MatMul":
            node.op_type, node.domain = "Unheard", "com.example"
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=r"cannot read .*BGE_M3_EP"):
        load_exact(path)
    with pytest.raises(EngineError, match=r"cannot convert .*BGE_M3_EP"):
        write_ir(path, tmp_path / "model.xml", {})


@needs_openvino
@pytest.mark.parametrize(("intra_threads", "streams"), [(1, 1), (2, 1), (1, 2)])
def test_failed_run_is_told_and_leaves_nothing_behind(tmp_path, intra_threads, streams):
    """With any number of threads an error is raised, and shapes that ran before run again."""
    backend = load_openvino_backend(
        graph_for_texts_of(5, tmp_path / "graph.onnx"),
        HeadProjections(),
        OpenVinoSettings(intra_threads, streams, "f32"),
    )
    for lengths in ((5,), (5, 5), (5,)):
        good = pad(texts(*lengths))
        for _ in range(2):
            sums = backend.run(good, ["dense_vecs"])["dense_vecs"]
            np.testing.assert_array_equal(sums, good.ids + 2)
            with pytest.raises(InferenceError, match=r"shape \(2, 7\)"):
                backend.run(pad(texts(4, 7)), ["dense_vecs"])


@needs_openvino
def test_model_that_is_gone_when_it_is_needed_again(tmp_path):
    """After a failed run the model is loaded again; when that fails, the run says so."""
    graph = graph_for_texts_of(5, tmp_path / "graph.onnx")
    backend = load_exact(graph)
    with pytest.raises(InferenceError, match="Add node"):
        backend.run(pad(texts(7)), ["dense_vecs"])
    graph.unlink()
    with pytest.raises(InferenceError, match=r"cannot be loaded again .* no model graph at"):
        backend.run(pad(texts(5)), ["dense_vecs"])


@needs_openvino
def test_every_option_is_one_that_the_engine_takes(tmp_path):
    """What is asked for is what the loaded model says of itself."""
    settings = OpenVinoSettings(1, streams=2, precision_hint="f32", cache_dir=tmp_path / "cache")
    openvino = import_openvino()
    compiled = openvino.Core().compile_model(
        write_tiny_model(tmp_path), "CPU", compile_options(settings, ["FP32"])
    )
    expected = {
        "NUM_STREAMS": 2,
        "INFERENCE_NUM_THREADS": 2,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": openvino.Type.f32,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,
    }
    assert {name: compiled.get_property(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("asked", "capabilities", "expected"),
    [
        (None, ["FP32", "INT8", "BF16"], "bf16"),
        (None, ["FP32", "INT8"], "f32"),
        ("f32", ["FP32", "BF16"], "f32"),
    ],
)
def test_bf16_is_used_where_the_processor_has_it(asked, capabilities, expected):
    """Unless a precision is asked for."""
    options = compile_options(OpenVinoSettings(1, precision_hint=asked), capabilities)
    assert options["INFERENCE_PRECISION_HINT"] == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("intra_threads", 0), ("streams", 0), ("dynamic_quantization_group_size", -1)],
)
def test_settings_that_the_engine_would_take_otherwise(field, value):
    """Zero threads or streams would let the engine choose."""
    with pytest.raises(ValueError, match=field):
        OpenVinoSettings(**{"intra_threads": 1, field: value})


def test_missing_package():
    """The start stops with how to get it."""

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    with pytest.raises(ProviderError, match=r"No module named 'openvino'.*bge-m3-server\[openvino"):
        import_openvino(missing)
    assert not is_installed(lambda name: None)


def test_half_a_package():
    """A folder that an uninstall left is none; what libraries raise that do not load is told."""
    left_behind = importlib.machinery.ModuleSpec("openvino", None, is_package=True)
    assert not is_installed(lambda name: left_behind)
    with pytest.raises(ProviderError, match=r"no attribute 'Core'.*bge-m3-server\[openvino"):
        import_openvino(types.ModuleType)

    def broken(name):
        raise RuntimeError("cannot map the library")

    with pytest.raises(ProviderError, match=r"cannot map the library.*bge-m3-server\[openvino"):
        import_openvino(broken)


@needs_openvino
def test_engine_version_is_that_of_the_package():
    """With the build, as the engine gives it."""
    assert engine_version() == importlib.import_module("openvino").get_version()


@needs_openvino
def test_importing_openvino_reports_nothing(tmp_path):
    """The package's usage reports, and the client id that goes with them, never come about."""
    code = (
        "import sys\n"
        "from bge_m3_server.adapters.openvino.package import import_openvino\n"
        "import_openvino()\n"
        "print([name for name, module in sys.modules.items()"
        " if name.startswith('openvino_telemetry') and module])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "installed", "architecture", "expected", "reason"),
    [
        ("avx2 avx512_vnni", True, "x86_64", True, "the processor has avx512_vnni"),
        ("avx2 avx_vnni", True, "AMD64", True, "the processor has avx_vnni"),
        ("avx512_vnni amx_int8", True, "x86_64", True, "the processor has amx_int8"),
        ("fma avx2", True, "x86_64", True, "the processor has avx2"),
        ("avx sse4_2", True, "x86_64", False, "none of amx_int8, avx512_vnni, avx_vnni, avx2"),
        ("", True, "x86_64", False, "none of amx_int8"),
        ("avx512_vnni", False, "x86_64", False, "bge-m3-server[openvino]"),
        ("asimddp i8mm", True, "aarch64", False, "the processor is aarch64, not x86-64"),
    ],
)
def test_openvino_is_preferred_by_a_rule(flags, installed, architecture, expected, reason):
    """It is the faster engine on x86-64 from AVX2 on."""
    preference = prefers_openvino(
        is_installed=installed, architecture=architecture, cpu_flags=flags.split()
    )
    assert preference.is_preferred is expected
    assert reason in preference.reason


@pytest.mark.parametrize(
    ("max_isa", "left"),
    [
        ("", "avx2 avx512f avx512_vnni avx512_bf16 amx_int8"),
        ("ALL", "avx2 avx512f avx512_vnni avx512_bf16 amx_int8"),
        ("avx512_core_bf16", "avx2 avx512f avx512_vnni avx512_bf16"),
        ("AVX512_CORE_VNNI", "avx2 avx512f avx512_vnni"),
        ("AVX512_CORE", "avx2 avx512f"),
        ("AVX2_VNNI", "avx2"),
        ("AVX2", "avx2"),
        ("SSE41", ""),
    ],
)
def test_onednn_can_be_kept_from_instructions(max_isa, left):
    """What `ONEDNN_MAX_CPU_ISA` hides, OpenVINO does not use, and the rule does not count on."""
    flags = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"]
    assert usable_flags(flags, max_isa) == frozenset(left.split())

    preference = prefers_openvino(
        is_installed=True, architecture="x86_64", cpu_flags=flags, max_isa=max_isa
    )
    assert preference.is_preferred is bool(left)
    if not preference.is_preferred:
        assert f"with ONEDNN_MAX_CPU_ISA={max_isa} the processor has none" in preference.reason


@needs_openvino
@pytest.mark.parametrize("linked", ["graph and weights", "weights"])
def test_a_model_of_links_is_read_under_other_names(tmp_path, linked):
    """Files of a hub cache give the vectors of the files themselves, and nothing is left behind."""
    plain = write_tiny_model(tmp_path / "plain", external_data=True)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for index, path in enumerate(sorted(plain.parent.iterdir())):
        if linked == "weights" and path == plain:
            (snapshot / path.name).write_bytes(path.read_bytes())
            continue
        blob = blobs / str(index)
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../blobs/{index}")

    backend = load_exact(snapshot / plain.name)

    np.testing.assert_array_equal(sentences(backend, 5, 9), sentences(load_exact(plain), 5, 9))
    assert not list(tmp_path.rglob(".openvino-*"))


@needs_openvino
def test_an_error_of_the_reader_is_not_called_one_of_the_cache(tmp_path):
    """What goes wrong while the other names are in use keeps its own reason."""
    plain = write_tiny_model(tmp_path / "plain")
    link = tmp_path / "model.onnx"
    link.symlink_to(plain)
    with pytest.raises(OSError, match=r"^mine$"), without_links(link):
        raise OSError("mine")


def test_links_that_cannot_be_avoided_are_a_matter_of_the_engine(tmp_path, monkeypatch):
    """On a cache that is only read another engine may take the model; the message tells how."""
    plain = write_tiny_model(tmp_path / "plain")
    link = tmp_path / "model.onnx"
    link.symlink_to(plain)

    def refused(_self, _target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(link), "hardlink_to", refused)
    with pytest.raises(EngineError, match=r"Read-only.*BGE_M3_MODEL_DIR"), without_links(link):
        pass

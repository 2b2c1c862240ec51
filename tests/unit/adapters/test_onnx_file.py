"""Reading an ONNX file's account of itself, against the `onnx` package as the reference."""

import numpy as np
import onnx
import pytest
from bge_m3_server.adapters.models.onnx_file import (
    ExternalData,
    TensorInfo,
    check_external_data,
    inspect_graph,
)
from bge_m3_server.domain.errors import CorruptFileError
from onnx import TensorProto, helper, numpy_helper

from tests.support.tiny_models import CONSTANT_FILE, write_tiny_model


@pytest.mark.parametrize("layout", ["sentence_and_tokens", "last_hidden_state", "ready_heads"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("external_data", [False, True])
def test_initializers_are_those_that_onnx_reads(tmp_path, layout, precision, external_data):
    """Names, shapes and element types agree with the reference reader; nothing is loaded."""
    path = write_tiny_model(tmp_path, layout, precision=precision, external_data=external_data)
    expected = onnx.load(path, load_external_data=False).graph.initializer

    found = inspect_graph(path)

    assert found.size_bytes == path.stat().st_size
    assert found.initializers == {
        tensor.name: TensorInfo(
            tuple(tensor.dims), str(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        )
        for tensor in expected
    }
    assert found.initializers["embeddings.position_embeddings.weight"].dims == (66, 16)


def test_references_to_other_files_are_found_in_nodes_too(tmp_path):
    """The weights' file and the file of a Constant node's attribute are both listed."""
    path = write_tiny_model(tmp_path, external_data=True)

    external = inspect_graph(path).external

    assert {reference.location for reference in external} == {"model.onnx_data", CONSTANT_FILE}
    assert ExternalData(CONSTANT_FILE, 0, 64) in external
    last = max(reference.offset_bytes + reference.length_bytes for reference in external)
    assert last == path.with_name("model.onnx_data").stat().st_size
    check_external_data(path)


def test_references_within_subgraphs_are_found(tmp_path):
    """A tensor in the branch of an If node counts like any other."""
    path = save(tmp_path, nodes=[if_node(external_tensor("branch.bin", length=8))])

    assert inspect_graph(path).external == (ExternalData("branch.bin", 0, 8),)
    with pytest.raises(CorruptFileError, match=r"branch\.bin, which is missing"):
        check_external_data(path)


def test_metadata_is_read(tmp_path):
    """The model's own key → value pairs are kept, text beyond ASCII included."""
    path = save(tmp_path, metadata={"bge_m3_server.max_tokens": "512", "läng": "日本"})

    assert inspect_graph(path).metadata == {"bge_m3_server.max_tokens": "512", "läng": "日本"}


def test_a_length_left_out_follows_from_the_shape(tmp_path):
    """A reference without a length needs as many bytes as its tensor has."""
    tensor = external_tensor("data.bin", offset=100)
    path = save(tmp_path, initializers=[tensor])

    assert inspect_graph(path).external == (ExternalData("data.bin", 100, 8),)
    path.with_name("data.bin").write_bytes(bytes(107))
    with pytest.raises(CorruptFileError, match=r"data\.bin is truncated: it has 107 bytes.*108"):
        check_external_data(path)
    path.with_name("data.bin").write_bytes(bytes(108))
    check_external_data(path)


@pytest.mark.parametrize("name", ["model.onnx_data", CONSTANT_FILE])
def test_missing_and_short_files_are_named(tmp_path, name):
    """Each file that a model refers to must be there in full."""
    path = write_tiny_model(tmp_path, external_data=True)
    data = path.with_name(name)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=f"{name} is truncated"):
        check_external_data(path)

    data.unlink()
    with pytest.raises(CorruptFileError, match=f"{name}, which is missing"):
        check_external_data(path)


@pytest.mark.parametrize(
    "location",
    ["../secret", "a/../../secret", "/etc/passwd", "..\\secret", "C:\\secret", "\\\\host\\share"],
)
def test_a_reference_out_of_the_directory_is_refused(tmp_path, location):
    """No model may read files that are not its own."""
    path = save(tmp_path, initializers=[external_tensor(location, length=8)])
    (tmp_path / "secret").write_bytes(bytes(100))

    with pytest.raises(CorruptFileError, match="outside its directory"):
        check_external_data(path)


@pytest.mark.parametrize("location", ["", "."])
def test_a_reference_to_no_file_is_refused(tmp_path, location):
    """An empty location, or the directory itself, is a missing file."""
    path = save(tmp_path, initializers=[external_tensor(location, length=8)])

    with pytest.raises(CorruptFileError, match="missing"):
        check_external_data(path)


@pytest.mark.parametrize("bad", [{"offset": "-8"}, {"length": "-1"}, {"offset": "x"}], ids=str)
def test_a_bad_reference_is_refused(tmp_path, bad):
    """Offsets and lengths are natural numbers."""
    path = save(tmp_path, initializers=[external_tensor("data.bin", **bad)])

    with pytest.raises(CorruptFileError, match="bad reference"):
        inspect_graph(path)


def test_a_file_cut_anywhere_is_truncated(tmp_path):
    """At whatever byte the file stops, it is refused by name."""
    path = write_tiny_model(tmp_path, hidden=4, positions=6, vocabulary=10)
    content = path.read_bytes()

    for size in range(0, len(content), 13):
        path.write_bytes(content[:size])
        with pytest.raises(CorruptFileError, match=r"model\.onnx"):
            inspect_graph(path)
    path.write_bytes(content)
    assert inspect_graph(path).size_bytes == len(content)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2\n",
        b"<!DOCTYPE html><html></html>",
        b"\xff" * 64,
        bytes(64),
        b"\x3a\x00\x42\x00" * 2,
    ],
    ids=["lfs pointer", "html", "ones", "zeros", "two graphs"],
)
def test_what_is_no_model_is_refused(tmp_path, content):
    """Pointer files, error pages and noise are not taken for a model."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(CorruptFileError, match="no ONNX model"):
        inspect_graph(path)


def test_graphs_nested_without_end_are_refused(tmp_path):
    """Depth is bounded, so a hostile file cannot exhaust the stack."""
    node = if_node(external_tensor("x", length=8))
    for _ in range(20):
        branch = helper.make_graph([node], "branch", [], [])
        node = helper.make_node("If", ["condition"], ["out"], then_branch=branch)
    path = save(tmp_path, nodes=[node])

    with pytest.raises(CorruptFileError, match="nested too deeply"):
        inspect_graph(path)


def external_tensor(location, **reference):
    """A float tensor of two values, kept in `location`."""
    tensor = TensorProto(name="kept", dims=[2], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **reference}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def if_node(tensor):
    """An If node whose branch holds `tensor`."""
    branch = helper.make_graph([], "branch", [], [], [tensor])
    return helper.make_node("If", ["condition"], ["out"], then_branch=branch)


def save(directory, *, nodes=(), initializers=(), metadata=None):
    """A model of these parts; it need not make sense beyond them."""
    weights = [numpy_helper.from_array(np.ones(2, np.float32), "ones"), *initializers]
    model = helper.make_model(helper.make_graph(list(nodes), "parts", [], [], weights))
    helper.set_model_props(model, metadata or {})
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path

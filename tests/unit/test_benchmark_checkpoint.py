"""The benchmark's checkpoint, in small: the same weights in every format."""

import json
import struct

import attrs
import numpy as np
import onnx
import pytest
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.adapters.models.torch_weights import read_linear

from benchmarks.performance.checkpoint import write_checkpoint
from benchmarks.synthetic_bge_m3 import Shape

SMALL = Shape(
    layers=2, hidden=64, attention_heads=4, intermediate=256, positions=130, vocabulary=32
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(path / "made", SMALL, path / "cache")


def safetensors(path):
    """Tensors of a file, as its format is defined."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    data = content[8 + length :]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_weights_are_those_of_the_graph(directory):
    """Linear ones transposed, tables as they are, and each under its published name."""
    graph = onnx.load(directory / "onnx" / "model.onnx").graph
    by_name = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = safetensors(directory / "model.safetensors")
    wide, table = "encoder.layer.1.intermediate.dense.weight", "embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(found[wide], by_name[wide].T)
    np.testing.assert_array_equal(found[table], by_name[table])
    assert found.keys() == {name for name in by_name if not name.startswith("constant_")}
    assert len(found) == 5 + 16 * SMALL.layers


def test_the_configuration_is_that_of_the_shape(directory):
    """As transformers names its figures."""
    config = json.loads((directory / "config.json").read_text())
    names = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 130,
        "vocab_size": 32,
    }
    assert {name: config[name] for name in names} == names


def test_the_server_reads_the_same_directory(directory):
    """Graph, tokenizer and both heads."""
    files = local_model(directory)
    assert read_linear(files.sparse_path).weight.shape == (1, 64)
    assert read_linear(files.colbert_path).weight.shape == (64, 64)


def test_a_finished_checkpoint_is_kept_and_another_shape_replaces_it(directory, tmp_path):
    """Writing a full one takes a minute."""
    path = tmp_path / "made"
    for layers, is_written in ((1, True), (1, False), (2, True)):
        before = (path / "shape.json").stat().st_mtime_ns if path.exists() else 0
        write_checkpoint(path, attrs.evolve(SMALL, layers=layers), tmp_path)
        assert ((path / "shape.json").stat().st_mtime_ns != before) == is_written
    assert (path / "model.safetensors").read_bytes() == (
        directory / "model.safetensors"
    ).read_bytes()

"""Models from a plain directory."""

import json
import shutil

import pytest
from bge_m3_server.adapters.models.files import (
    RECORD_NAME,
    read_record,
    verify_file,
    write_record,
)
from bge_m3_server.adapters.models.local import local_model
from bge_m3_server.domain.errors import CorruptFileError, ModelError

from tests.support.tiny_models import write_tiny_model


def record_all(directory):
    """Write the record that `fetch --dir` leaves."""
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    write_record(directory, {name: verify_file(directory / name) for name in names})


def test_a_published_export_is_found(tmp_path):
    """Graph, tokenizer and head weights are taken from where the hub's repositories have them."""
    graph = write_tiny_model(tmp_path, external_data=True)

    files = local_model(tmp_path)

    assert files.graph_path == graph
    assert files.tokenizer_path == tmp_path / "tokenizer.json"
    assert files.sparse_path == tmp_path / "sparse_linear.pt"
    assert files.colbert_path == tmp_path / "colbert_linear.pt"
    assert files.precision is None


def test_a_graph_may_lie_in_the_directory_itself(tmp_path):
    """Without an ``onnx`` folder, the graph beside the tokenizer is taken."""
    write_tiny_model(tmp_path, "last_hidden_state", precision="fp16")
    shutil.move(tmp_path / "onnx/model_fp16.onnx", tmp_path / "model_fp16.onnx")

    files = local_model(tmp_path)

    assert files.graph_path == tmp_path / "model_fp16.onnx"
    assert files.precision == "fp16"


def test_the_variant_chooses_among_several_graphs(tmp_path):
    """A named variant is taken if it is there; without a name fp32 comes first."""
    write_tiny_model(tmp_path, precision="fp16")
    write_tiny_model(tmp_path)

    assert local_model(tmp_path).graph_path.name == "model.onnx"
    assert local_model(tmp_path, "fp16").graph_path.name == "model_fp16.onnx"
    with pytest.raises(ModelError, match=r"model_int8\.onnx.*it holds .*onnx/model\.onnx"):
        local_model(tmp_path, "int8")
    with pytest.raises(ModelError, match="no directory holds the variant 'preview'"):
        local_model(tmp_path, "preview")


def test_head_weights_are_optional(tmp_path):
    """A graph may carry its heads itself."""
    write_tiny_model(tmp_path, "ready_heads")
    (tmp_path / "sparse_linear.pt").unlink()
    (tmp_path / "colbert_linear.pt").unlink()

    files = local_model(tmp_path)

    assert files.sparse_path is None
    assert files.colbert_path is None


def test_what_is_missing_is_told_with_what_is_there(tmp_path):
    """An empty directory, a missing one and one without a tokenizer are told apart."""
    with pytest.raises(ModelError, match=r"expected onnx/model\.onnx.*it holds no files"):
        local_model(tmp_path)
    with pytest.raises(ModelError, match="not a directory"):
        local_model(tmp_path / "nowhere")

    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*sparse_linear\.pt"):
        local_model(tmp_path)


def test_missing_external_weights_are_named(tmp_path):
    """A graph copied without its data is refused before an engine sees it."""
    graph = write_tiny_model(tmp_path, external_data=True)
    graph.with_name("model.onnx_data").unlink()

    with pytest.raises(CorruptFileError, match=r"model\.onnx_data, which is missing"):
        local_model(tmp_path)


@pytest.mark.parametrize("name", ["onnx/model.onnx_data", "tokenizer.json", "sparse_linear.pt"])
def test_a_recorded_directory_is_verified(tmp_path, name):
    """Any file that was cut, altered or lost since it was fetched is refused by name."""
    write_tiny_model(tmp_path, external_data=True)
    record_all(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    local_model(tmp_path)

    path.write_bytes(content[:-1])
    with pytest.raises(CorruptFileError, match=f"{name} is truncated or was changed"):
        local_model(tmp_path)

    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptFileError, match=f"{name} is truncated or corrupt"):
        local_model(tmp_path)

    path.unlink()
    with pytest.raises(ModelError, match=name):
        local_model(tmp_path)


def test_a_copied_directory_is_hashed_once_and_recorded_anew(tmp_path):
    """A copy has new times: it is verified by its hashes, and then trusted by its times."""
    write_tiny_model(tmp_path / "fetched", external_data=True)
    record_all(tmp_path / "fetched")
    copied = shutil.copytree(
        tmp_path / "fetched", tmp_path / "copied", copy_function=shutil.copyfile
    )

    local_model(copied)

    entry = read_record(copied)["onnx/model.onnx_data"]
    assert entry.mtime_ns == (copied / "onnx/model.onnx_data").stat().st_mtime_ns
    assert entry.mtime_ns != read_record(tmp_path / "fetched")["onnx/model.onnx_data"].mtime_ns


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"files": 3}', b'{"files": {"a": {"size_bytes": "x"}}}'),
        b'{"files": {"a": {"size_bytes": 1e999, "mtime_ns": 1, "sha256": "", "source": ""}}}',
        b"[" * 200_000,
    ],
)
def test_a_damaged_record_is_no_record(tmp_path, content):
    """What cannot be read is ignored, not believed in part."""
    write_tiny_model(tmp_path)
    (tmp_path / RECORD_NAME).write_bytes(content)

    assert read_record(tmp_path) == {}
    local_model(tmp_path)


def test_a_record_is_replaced_whole(tmp_path):
    """No partial file is left beside it, and what was written is read back."""
    (tmp_path / "a").write_bytes(b"abc")
    records = {"a": verify_file(tmp_path / "a")}

    write_record(tmp_path, records)
    write_record(tmp_path, records)

    assert read_record(tmp_path) == records
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", RECORD_NAME]
    assert json.loads((tmp_path / RECORD_NAME).read_bytes())["files"]["a"]["size_bytes"] == 3


def test_a_record_that_cannot_be_written_is_done_without(tmp_path, caplog):
    """Where the directory is read-only, the start goes on and says what it costs."""
    write_record(tmp_path / "nowhere", {})

    assert "hashed again" in caplog.text

"""Prepared models in a cache that was tampered with, half written, or left behind."""

import json
import os
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from bge_m3_server.adapters.models import building
from bge_m3_server.adapters.models.files import is_whole
from bge_m3_server.adapters.models.verification import read_embeddings, write_embeddings

from tests.support.preparable import ORT, Loads
from tests.support.preparation import kept, prepared
from tests.support.tiny_models import tiny_tokenizer

pytest_plugins = ["tests.support.prepare_fixtures"]

NEWER = attrs.evolve(ORT, environment="version 2")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_other_weights_of_the_same_size_and_date_are_another_source(directory, cache):
    """Images that are built the same way twice give all files one date."""
    weights = directory / "onnx" / "model.onnx_data"
    os.utime(weights, ns=(0, 0))
    first = prepared(Loads().of(directory), cache)
    other = bytearray(weights.read_bytes())
    other[len(other) // 2] ^= 1
    weights.unlink()
    weights.write_bytes(other)
    os.utime(weights, ns=(0, 0))

    assert prepared(Loads().of(directory), cache).graph_path != first.graph_path


def test_another_tokenizer_is_another_source(directory, cache):
    """Both forms were compared on texts that it has cut into tokens."""
    first = prepared(Loads().of(directory), cache)
    path = directory / "tokenizer.json"
    path.write_text(tiny_tokenizer(32).to_str(), encoding="utf-8")

    assert prepared(Loads().of(directory), cache, NEWER).graph_path != first.graph_path


def test_a_reference_of_other_texts_is_damage(original, cache):
    """What cannot be compared with is made anew."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    path = first.graph_path.with_name("reference.npz")
    fewer = [attrs.evolve(each, colbert=each.colbert[:2]) for each in read_embeddings(path)]
    status = path.stat()
    write_embeddings(path, fewer)
    record_path = path.with_name("bge-m3-server.files.json")
    record = json.loads(record_path.read_text())
    record["files"][path.name]["size_bytes"] = path.stat().st_size
    record_path.write_text(json.dumps(record))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert prepared(loads.of(original), cache, NEWER) == first
    assert loads.count == 2
    assert len(read_embeddings(path)[-1].colbert) > 2


def test_what_was_built_is_on_the_disk_before_it_counts(original, cache, monkeypatch):
    """Files and their names are flushed under the first name; then the new name is."""
    flushed = []
    flush = os.fsync

    def noting(descriptor):
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        flush(descriptor)

    monkeypatch.setattr(building.os, "fsync", noting)
    target = prepared(Loads().of(original), cache).graph_path.parent

    *before, last = flushed
    assert all("/.building-" in str(path) for path in before)
    assert {path.name for path in target.iterdir()} < {path.name for path in before}
    assert last == target.parent


def test_a_disk_that_fails_while_flushing_stops_the_build(original, cache, monkeypatch):
    """An error of the disk is told; a file system that cannot flush is good enough."""
    for number, is_told in ((5, True), (22, False)):

        def failing(_descriptor, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(building.os, "fsync", failing)
        if is_told:
            with pytest.raises(Exception, match="Input/output error"):
                prepared(Loads().of(original), cache)
            assert kept(cache) == []
        else:
            assert is_whole(prepared(Loads().of(original), cache).graph_path.parent)


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_leftovers_go_even_when_nothing_is_built(original, cache, kind):
    """A build that was killed may be the last one for a long time."""
    files = prepared(Loads().of(original), cache)
    leftover = cache / "prepared" / ".building-dead"
    if kind == "directory":
        leftover.mkdir()
        (leftover / "model.onnx").write_bytes(b"half of a mod")
        long_ago = time.time() - 3600
        os.utime(leftover, (long_ago, long_ago))
    elif kind == "file":
        leftover.write_bytes(b"half of a mod")
    else:
        leftover.symlink_to("nowhere")

    assert prepared(Loads().of(original), cache) == files

    assert not os.path.lexists(leftover)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_under_the_final_name_goes(original, cache, kind):
    """It is replaced, and not kept under another name."""
    files = prepared(Loads().of(original), cache)
    target = files.graph_path.parent
    target.rename(cache / "aside")
    target.write_bytes(b"") if kind == "file" else target.symlink_to("nowhere")

    assert prepared(Loads().of(original), cache) == files

    assert not [path for path in (cache / "prepared").iterdir() if path.name.startswith(".")]


def test_an_agreement_that_cannot_be_written_leaves_nothing(original, cache):
    """Each start compares again, and the directory does not fill."""
    directory = prepared(Loads().of(original), cache).graph_path.parent
    prepared(Loads().of(original), cache, NEWER)
    (agreement,) = directory.glob("agrees-*.json")
    agreement.unlink()
    agreement.mkdir()
    names = sorted(directory.iterdir())

    files = prepared(Loads().of(original), cache, NEWER)

    assert sorted(directory.iterdir()) == names
    assert np.isfinite(read_embeddings(files.graph_path.with_name("reference.npz"))[0].dense).all()

"""Prepared models in the cache: made once, kept whole, whatever happens meanwhile."""

import concurrent.futures
import os
import shutil
import threading
import time

import attrs
import numpy as np
import pytest
from bge_m3_server.adapters.models.building import move_to
from bge_m3_server.adapters.models.files import is_whole
from bge_m3_server.adapters.models.prepare import prepare
from bge_m3_server.domain.errors import CacheDirectoryError, PreparationError

from tests.support.openvino_mark import needs_openvino
from tests.support.preparable import ORT, SMALL, Loads
from tests.support.preparation import IMPOSSIBLE, OPENVINO, Steps, kept, prepared
from tests.support.tiny_models import write_linear

pytest_plugins = ["tests.support.prepare_fixtures"]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_the_second_start_takes_what_is_there(original, cache):
    """Neither the source is loaded again nor a file written."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    steps = Steps()

    second = prepare(loads.of(original), ORT, cache, steps)

    assert second == first
    assert loads.count == 1
    assert steps.names == []
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == times


@pytest.mark.parametrize("name", ["onnx/model.onnx_data", "sparse_linear.pt"])
def test_another_source_is_prepared_anew(directory, cache, name):
    """A change of the weights or of a head leads to another directory."""
    loads = Loads()
    first = prepared(loads.of(directory), cache)
    path = directory / name
    if path.suffix == ".pt":
        write_linear(path, np.ones((1, SMALL.hidden), np.float32), np.zeros(1, np.float32))
    else:
        flip_a_bit(path)

    second = prepared(loads.of(directory), cache)

    assert second.graph_path != first.graph_path
    assert loads.count == 2


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx_data", "fidelity.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, os.unlink])
def test_damaged_files_are_built_again(original, cache, name, damage):
    """Whatever became of a file, the next start serves a whole model."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    whole = (first.graph_path.parent / name).read_bytes()
    damage(first.graph_path.parent / name)

    second = prepared(loads.of(original), cache)

    assert second == first
    assert loads.count == 2
    assert (second.graph_path.parent / name).read_bytes() == whole
    assert kept(cache) == [second.graph_path.parent]


def test_what_a_killed_preparation_left_is_removed(original, cache):
    """Restarts in a row do not fill the disk, and a preparation that still runs is left alone."""
    source = Loads().of(original)
    long_ago = time.time() - 86400
    dead = cache / "prepared" / ".building-dead"
    dead.mkdir(parents=True)
    (dead / "model.onnx").write_bytes(b"half of a mod")
    os.utime(dead, (long_ago, long_ago))

    def another_starts(step, _share):
        if step != "comparing with the source":
            return
        for path in cache.glob("prepared/.building-*"):
            os.utime(path, (long_ago, long_ago))
        with pytest.raises(PreparationError):
            prepare(source, attrs.evolve(ORT, name="other"), cache, Steps(), IMPOSSIBLE)

    files = prepare(source, ORT, cache, another_starts)

    assert is_whole(files.graph_path.parent)
    assert not list(cache.glob("prepared/.building-*"))


def test_an_unfinished_model_under_the_final_name_is_replaced(original, cache):
    """A directory without its record is no model, however it came there."""
    files = prepared(Loads().of(original), cache)
    target = files.graph_path.parent
    for path in target.iterdir():
        path.unlink()
    (target / "model.onnx").write_bytes(b"half of a mod")
    assert prepared(Loads().of(original), cache) == files
    assert is_whole(target)


def test_several_preparations_at_once_all_succeed(original, cache):
    """Whoever is first wins, and the others serve the winner's files."""
    together = threading.Barrier(3, timeout=30)

    def gather(step, _share):
        if step == "comparing with the source":
            together.wait()

    def one(_):
        return prepare(Loads().of(original), ORT, cache, gather)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(one, range(3)))

    assert results[0] == results[1] == results[2]
    assert kept(cache) == [results[0].graph_path.parent]
    assert is_whole(results[0].graph_path.parent)


def test_what_has_just_been_moved_is_not_replaced(tmp_path):
    """Of two builds that end together one is served; the other sees it, however close they are."""
    target, first, second = tmp_path / "target", tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    other = threading.Thread(target=move_to, args=(target, second, target.exists))

    def is_there():
        was_there = target.exists()
        if other.ident is None:  # the other one ends between this look and the move
            other.start()
            other.join(timeout=0.5)
        return was_there

    move_to(target, first, is_there)
    other.join()

    assert second.exists()
    assert not first.exists()


@pytest.mark.parametrize("other", ["whole", "damaged"])
def test_another_process_may_be_first(original, cache, other):
    """What appears under the name meanwhile is used if it is whole, and replaced if not."""
    twin = prepared(Loads().of(original), cache).graph_path.parent
    aside = twin.rename(cache / "aside")
    if other == "damaged":
        truncate(aside / "model.onnx_data")

    def while_comparing(step, _share):
        if step == "comparing with the source":
            shutil.copytree(aside, twin)

    files = prepare(Loads().of(original), ORT, cache, while_comparing)

    assert is_whole(files.graph_path.parent)
    assert kept(cache) == [twin]


@pytest.mark.parametrize("blocked", ["cache", "cache/prepared"])
def test_a_cache_that_cannot_be_written_is_named(original, tmp_path, blocked):
    """The message says which directory, and what to do."""
    path = tmp_path / blocked
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file is in the way")
    with pytest.raises(CacheDirectoryError, match=r"cache.*BGE_M3_CACHE_DIR"):
        prepared(Loads().of(original), tmp_path / "cache")


@needs_openvino
def test_each_engine_has_a_form_of_its_own(original, cache):
    """Both lie side by side, and the source is hashed for both."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    second = prepared(loads.of(original), cache, OPENVINO)
    assert {path.name for path in second.graph_path.parent.glob("model*")} == {
        "model.xml",
        "model.bin",
    }
    assert kept(cache) == sorted([first.graph_path.parent, second.graph_path.parent])

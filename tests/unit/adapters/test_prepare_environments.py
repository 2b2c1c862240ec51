"""Prepared models under another version of the engine, or on another processor."""

import json
import os

import attrs
import pytest
from bge_m3_server.adapters.models.files import is_whole
from bge_m3_server.adapters.models.prepare import BLOCK_SIZES, prepare
from bge_m3_server.domain.errors import PreparationError
from bge_m3_server.domain.fidelity import FLOORS

from tests.support.preparable import ORT, Loads, load_on_cpu

pytest_plugins = ["tests.support.prepare_fixtures"]

NEWER = attrs.evolve(ORT, environment="version 2")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def prepared(source, cache, engine=ORT, **options):
    return prepare(source, engine, cache, lambda _step, _share: None, **options)


def test_another_environment_compares_once_and_without_the_source(original, cache):
    """A new version of the engine is held to the kept numbers of the source; then it is known."""
    loads, compared = Loads(), []

    def load(graph):
        compared.append(graph)
        return load_on_cpu(graph)

    first = prepared(loads.of(original), cache)
    newer = attrs.evolve(NEWER, load=load)
    for _ in range(2):
        assert prepared(loads.of(original), cache, newer) == first
    assert prepared(loads.of(original), cache, attrs.evolve(ORT, load=load)) == first

    assert compared == [first.graph_path]
    assert loads.count == 1
    directory = first.graph_path.parent
    (agreement,) = (json.loads(path.read_text()) for path in directory.glob("agrees-*.json"))
    verdict = json.loads((directory / "fidelity.json").read_text())
    assert (verdict["environment"], agreement["environment"]) == ("version 1", "version 2")
    assert agreement["fidelity"] == pytest.approx(verdict["fidelity"])


def test_a_model_that_another_environment_spoils_is_built_again(original, cache):
    """What is not exact enough there any more is replaced by smaller blocks."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    verdict_path = first.graph_path.parent / "fidelity.json"
    figure = json.loads(verdict_path.read_text())["fidelity"]["dense_cosine_min"]
    finer = attrs.evolve(FLOORS, dense_cosine_min=figure + 1e-6)

    assert prepared(loads.of(original), cache, NEWER, floors=finer) == first

    verdict = json.loads(verdict_path.read_text())
    assert (verdict["environment"], verdict["block_size"]) == ("version 2", BLOCK_SIZES[1])
    assert loads.count == 2
    assert [path for path in (cache / "prepared").iterdir() if path.is_dir()] == [
        verdict_path.parent
    ]


def test_a_refusal_holds_for_its_environment_only(original, cache):
    """A newer version of the engine gets its chance."""
    impossible = attrs.evolve(FLOORS, dense_cosine_min=1.5)
    with pytest.raises(PreparationError):
        prepared(Loads().of(original), cache, floors=impossible)

    files = prepared(Loads().of(original), cache, NEWER)

    assert is_whole(files.graph_path.parent)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"fidelity": {}}', "[" * 200_000, "low figures"]
)
def test_half_an_agreement_is_none(original, cache, content):
    """What does not tell that this environment has compared well makes it compare again."""
    compared = []

    def load(graph):
        compared.append(graph)
        return load_on_cpu(graph)

    directory = prepared(Loads().of(original), cache).graph_path.parent
    newer = attrs.evolve(NEWER, load=load)
    prepared(Loads().of(original), cache, newer)
    (agreement,) = directory.glob("agrees-*.json")
    whole = json.loads(agreement.read_text())
    if content == "low figures":
        whole["fidelity"]["dense_cosine_min"] = 0.1
        content = json.dumps(whole)
    agreement.write_text(content)
    prepared(Loads().of(original), cache, newer)

    assert len(compared) == 2
    assert json.loads(agreement.read_text())["fidelity"]["dense_cosine_min"] > 0.9
    assert [path.name for path in directory.glob("*agrees*")] == [agreement.name]


@pytest.mark.parametrize("name", ["fidelity.json", "reference.npz"])
def test_damage_that_does_not_show_in_size_or_date_is_mended(original, cache, name):
    """A file that cannot be read any more makes the model be built again, not the start fail."""
    loads = Loads()
    first = prepared(loads.of(original), cache)
    path = first.graph_path.with_name(name)
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert prepared(loads.of(original), cache, NEWER) == first
    assert loads.count == 2
    assert is_whole(first.graph_path.parent)

"""Coefficients from one start to the next."""

import json
import threading

import attrs
import pytest
from bge_m3_server.adapters.coefficient_store import (
    FILE_NAME,
    JsonCoefficientStore,
    model_fingerprint,
)
from bge_m3_server.domain.probe_fit import Coefficients, Fit, FitQuality
from bge_m3_server.domain.types import ProbeKey

KEY = ProbeKey(
    server_version="1.0",
    model_id="bge-m3",
    model_fingerprint="ab" * 32,
    precision="fp32",
    engine="onnxruntime CPUExecutionProvider",
    engine_version="1.22",
    intra_threads=2,
    max_tokens=8192,
    cpu_model="Some CPU",
    architecture="x86_64",
)
FIT = Fit(Coefficients(90_000.0, 190.5), FitQuality(0.9999, 0.04, 1.13, 8))


@pytest.fixture
def store(tmp_path):
    return JsonCoefficientStore(tmp_path / "cache")


def edited(store, change):
    """The stored record after `change`."""
    record = json.loads(store.path.read_text())
    change(record)
    store.path.write_text(json.dumps(record))


def test_what_is_saved_is_loaded(store):
    """Coefficients and quality come back as they were."""
    assert store.save(KEY, FIT) is None
    assert store.load(KEY) == FIT
    assert [path.name for path in store.directory.iterdir()] == [FILE_NAME]


def test_what_limited_a_probe_is_remembered(store):
    """More memory would be a reason to measure again."""
    limited = attrs.evolve(FIT, limited_to_bytes=500_000_000)
    store.save(KEY, limited)

    assert store.load(KEY) == limited


def test_linear_attention_is_remembered(store):
    """A quadratic term of none is a figure like any other."""
    linear = attrs.evolve(
        FIT, coefficients=attrs.evolve(FIT.coefficients, b_bytes_per_token_sq=0.0)
    )
    store.save(KEY, linear)

    assert store.load(KEY) == linear


def test_nothing_there_yet(store):
    """A first start is no error."""
    assert "there is no" in store.load(KEY)


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(ProbeKey)])
def test_every_condition_counts(store, field):
    """A change of any one condition makes the record foreign, and the reason names it."""
    store.save(KEY, FIT)
    changed = {field: getattr(KEY, field) * 2}
    reason = store.load(attrs.evolve(KEY, **changed))

    assert f"{field} is {getattr(KEY, field)!r} there and {changed[field]!r} here" in reason


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b"[]", b"\xff\xfe", b"{}"),
        *(b'{"schema_version": 3}', b'{"schema_version": 99}'),
        b"[" * 200_000,
    ],
)
def test_corrupt_files_are_misses(store, content):
    """Whatever lies there, the start goes on and says why nothing was used."""
    store.directory.mkdir()
    store.path.write_bytes(content)

    assert str(store.path) in store.load(KEY)


@pytest.mark.parametrize("key", [None, [], "bge-m3", {}])
def test_a_record_without_a_proper_key(store, key):
    """A record that does not say what it was measured under is foreign."""
    store.save(KEY, FIT)
    edited(store, lambda record: record.update(key=key))

    assert "under other conditions" in store.load(KEY)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("coefficients", "a_bytes_per_token", 0),
        ("coefficients", "a_bytes_per_token", 10**400),
        ("coefficients", "fixed_bytes", 10**400),
        ("coefficients", "a_bytes_per_token", -90_000.0),
        ("coefficients", "a_bytes_per_token", 1e12),
        ("coefficients", "b_bytes_per_token_sq", -1.0),
        ("coefficients", "b_bytes_per_token_sq", float("nan")),
        ("coefficients", "b_bytes_per_token_sq", float("inf")),
        ("coefficients", "b_bytes_per_token_sq", "190"),
        ("coefficients", "b_bytes_per_token_sq", True),
        ("coefficients", "c", 1.0),
        ("coefficients", "fixed_bytes", float("nan")),
        ("coefficients", "fixed_bytes", 1e12),
        ("quality", "margin", None),
        ("quality", "margin", -1.2),
        ("quality", "margin", 0.0),
        ("quality", "margin", 10**400),
        ("quality", "r_squared", -1e300),
        ("quality", "r_squared", 1.5),
        ("quality", "worst_relative_error", -0.1),
        ("quality", "points", 0),
        ("quality", "points", 1),
        ("quality", "points", 8.5),
        ("quality", "points", True),
        ("quality", "margin", float("nan")),
        ("quality", "margin", float("inf")),
        ("quality", "surprise", 1.0),
    ],
)
def test_impossible_figures_are_misses(store, part, name, value):
    """Coefficients are checked on the way in: a file can be edited."""
    store.save(KEY, FIT)
    edited(store, lambda record: record[part].update({name: value}))

    assert "no probe can have given" in store.load(KEY)


@pytest.mark.parametrize("limit", [0, -1, True, 5e8, "1", 10**400])
def test_limits_that_no_probe_has_met_are_misses(store, limit):
    """They are compared with what there is now."""
    store.save(KEY, FIT)
    edited(store, lambda record: record.update(limited_to_bytes=limit))

    assert "no probe can have given" in store.load(KEY)


def test_figures_longer_than_python_reads_are_misses(store):
    """A file of 5000 digits is no reason not to start."""
    store.save(KEY, FIT)
    store.path.write_text(store.path.read_text().replace("90000.0", "9" * 5000))

    assert "cannot be read" in store.load(KEY)


def test_what_would_not_be_believed_is_not_saved(store):
    """What was found to be far too low before goes as well: the next start measures again."""
    store.save(KEY, FIT)
    reason = store.save(KEY, attrs.evolve(FIT, coefficients=FIT.coefficients.scaled(8.0)))

    assert "would not believe them" in reason
    assert "a_bytes_per_token=720000.0" in reason
    assert "there is no" in store.load(KEY)


def test_what_would_not_be_believed_is_no_error_on_a_first_start(store):
    """Nothing is there to be removed, not even the directory."""
    assert "would not believe" in store.save(KEY, Fit(Coefficients(1.0, 0.0), FIT.quality))


def test_missing_parts_are_misses(store):
    """A record without its figures is worth nothing."""
    store.save(KEY, FIT)
    edited(store, lambda record: record.pop("quality"))

    assert "no probe can have given" in store.load(KEY)


def test_a_directory_that_cannot_be_written(tmp_path):
    """Saving fails with a reason, not with an exception."""
    (tmp_path / "file").write_text("in the way")
    store = JsonCoefficientStore(tmp_path / "file")

    assert "cannot be written" in store.save(KEY, FIT)
    assert "cannot be read" in store.load(KEY)


def test_a_failed_save_leaves_nothing_behind(store):
    """A record that cannot take its place is cleaned up."""
    store.path.mkdir(parents=True)

    assert "cannot be written" in store.save(KEY, FIT)
    assert list(store.directory.iterdir()) == [store.path]


def test_servers_that_share_a_directory(store):
    """Readers see whole records while several writers save at the same time."""
    store.save(KEY, FIT)
    seen, saved = [], []
    writers = [
        threading.Thread(target=lambda: saved.extend(store.save(KEY, FIT) for _ in range(20)))
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.append(store.load(KEY))
    for writer in writers:
        writer.join()

    assert saved == [None] * 80
    assert all(found == FIT for found in seen)
    assert [path.name for path in store.directory.iterdir()] == [FILE_NAME]


def test_fingerprint_of_a_model(tmp_path):
    """Operations come first in the file; a change there, at the end or in size is another model."""
    path = tmp_path / "model.onnx"
    middle = bytes(3 << 20)

    def fingerprint(content):
        path.write_bytes(content)
        return model_fingerprint(path)

    same = fingerprint(b"head" + middle + b"tail")
    assert fingerprint(b"head" + middle + b"tail") == same
    others = {
        fingerprint(b"HEAD" + middle + b"tail"),
        fingerprint(b"head" + middle + b"TAIL"),
        fingerprint(b"head" + middle + b"\0tail"),
        fingerprint(b"tiny"),
    }
    assert len(others | {same}) == 5

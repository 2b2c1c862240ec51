"""Log lines."""

import enum
import io
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from bge_m3_server.adapters.telemetry.logging import configure_logging
from bge_m3_server.domain.types import Heads

LOG = logging.getLogger("bge_m3_server.test")
LIBRARIES = ("uvicorn", "uvicorn.access", "uvicorn.error", "litestar", "huggingface_hub")
RFC3339_UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


@pytest.fixture(autouse=True)
def _restore_logging():
    """Leave the process's loggers as they were."""
    root = logging.getLogger()
    names = [*LIBRARIES, LOG.name, "bge_m3_server"]
    saved = {
        name: (logger.level, logger.propagate, list(logger.handlers))
        for name in names
        for logger in [logging.getLogger(name)]
    }
    level, handlers = root.level, list(root.handlers)
    yield
    for name, (own_level, propagate, own_handlers) in saved.items():
        logger = logging.getLogger(name)
        logger.setLevel(own_level)
        logger.propagate = propagate
        logger.handlers[:] = own_handlers
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def out():
    return io.StringIO()


def json_line(out):
    """The one line that was written, as an object."""
    (line,) = out.getvalue().split("\n")[:-1]
    return json.loads(line)


def raised(error):
    """The error with the traceback of having been raised."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_json_line_has_the_agreed_shape(out):
    """Two keys identify the service, then time, level, event fields and logger, in this order."""
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    LOG.info("embedding request complete", extra={"fields": {"batch_size": 3, "total_ms": 1.5}})
    line = json_line(out)
    assert list(line) == ["bge_module", "build", "timestamp", "level", "fields", "target"]
    assert re.fullmatch(RFC3339_UTC, line.pop("timestamp"))
    assert line == {
        "bge_module": "server",
        "build": "cpu",
        "level": "INFO",
        "fields": {"message": "embedding request complete", "batch_size": 3, "total_ms": 1.5},
        "target": "bge_m3_server.test",
    }
    assert out.getvalue().startswith('{"bge_module":"server","build":"cpu","timestamp":"')


def test_build_is_told(out):
    """A line says which kind of build wrote it."""
    configure_logging("json", {"": logging.INFO}, "cuda", out)
    LOG.info("x")
    assert json_line(out)["build"] == "cuda"


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (logging.DEBUG, "DEBUG"),
        (logging.INFO, "INFO"),
        (logging.WARNING, "WARN"),
        (logging.ERROR, "ERROR"),
        (logging.CRITICAL, "ERROR"),
    ],
)
def test_level_names(out, level, name):
    """Levels bear the names that collectors filter by."""
    configure_logging("json", {"": logging.DEBUG}, "cpu", out)
    LOG.log(level, "x")
    assert json_line(out)["level"] == name


def test_message_arguments_are_filled_in(out):
    """Third-party style arguments become part of the message."""
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    LOG.info("%d of %s", 3, "four")
    assert json_line(out)["fields"] == {"message": "3 of four"}


def test_a_field_never_replaces_the_message(out):
    """The event's message wins over a field of that name."""
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    LOG.info("real", extra={"fields": {"message": "forged"}})
    assert json_line(out)["fields"] == {"message": "real"}


def test_exception_stays_on_one_json_line(out):
    """An exception becomes two fields; its newlines are escaped."""
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    error = ValueError("first\nsecond")
    LOG.error("Internal error", exc_info=raised(error), extra={"fields": {"request_id": "r1"}})
    fields = json_line(out)["fields"]
    assert fields["error"] == "ValueError: first\nsecond"
    assert fields["traceback"].startswith("Traceback (most recent call last)")
    assert fields["request_id"] == "r1"


class Colour(enum.Enum):
    RED = "red"
    NUMBERED = 7


class Odd:
    def __str__(self):
        return "odd\udc80"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\nb\x00\x1b[31m\u2028", "a\nb\x00\x1b[31m\u2028"),
        ("lone \ud800 surrogate", "lone \ufffd surrogate"),
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.longdouble(2), "2.0"),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (Colour.RED, "red"),
        (Colour.NUMBERED, "NUMBERED"),
        (Heads.DENSE, "DENSE"),
        (Path("/cache/models"), "/cache/models"),
        ({"k\n": (1, {2})}, {"k\n": [1, [2]]}),
        ({Colour.RED: None, 3: "x"}, {"red": None, "3": "x"}),
        (2**70, str(2**70)),
        (2**64 - 1, 2**64 - 1),
        (float("nan"), None),
        (b"bytes", "b'bytes'"),
        (Odd(), "odd\ufffd"),
        (True, True),
    ],
)
def test_any_value_is_written(out, value, expected):
    """No value breaks the line or is lost with it."""
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    LOG.info("x", extra={"fields": {"value": value}})
    assert json_line(out)["fields"]["value"] == expected


def test_text_line(out):
    """Time, level, logger, message, then fields; text with blanks is quoted."""
    configure_logging("text", {"": logging.INFO}, "cpu", out)
    LOG.warning("ready", extra={"fields": {"port": 8081, "model": "bge m3", "heads": ["dense"]}})
    assert re.fullmatch(
        RFC3339_UTC
        + r'  WARN bge_m3_server\.test: ready port=8081 model="bge m3" heads=\["dense"\]\n',
        out.getvalue(),
    )


def test_text_values_cannot_forge_lines(out):
    """Newlines and terminal escapes in message, keys and values are written as escapes."""
    configure_logging("text", {"": logging.INFO}, "cpu", out)
    hostile = "a\nINFO forged\r\x1b[2J\x85\u2028\udc80"
    LOG.info(hostile, extra={"fields": {hostile: hostile, "e": ""}})
    line, end = out.getvalue()[:-1], out.getvalue()[-1]
    assert end == "\n"
    assert line.splitlines() == [line]
    assert "\x1b" not in line
    assert line.endswith(' e=""')


def test_text_traceback_is_indented(out):
    """A traceback stays readable, and no line of it looks like a record."""
    configure_logging("text", {"": logging.INFO}, "cpu", out)
    error = RuntimeError("broken\n2026-01-01T00:00:00.000000Z  INFO forged: x")
    LOG.error("Internal error", exc_info=raised(error))
    head, *rest = out.getvalue().splitlines()
    assert "Internal error error=" in head
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_write_through_the_same_handler(out, name):
    """A library that came with a handler and a level of its own follows the one filter."""
    library = logging.getLogger(name)
    own = io.StringIO()
    library.addHandler(logging.StreamHandler(own))
    library.propagate = False
    library.setLevel(logging.ERROR)
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    library.info("from a library")
    assert json_line(out)["target"] == name
    assert own.getvalue() == ""


def test_configuring_twice_writes_once(out):
    """The second call replaces the first, stream and format included."""
    first = io.StringIO()
    configure_logging("text", {"": logging.INFO}, "cpu", first)
    configure_logging("json", {"": logging.INFO}, "cpu", out)
    LOG.info("once")
    assert json_line(out)["fields"]["message"] == "once"
    assert first.getvalue() == ""


def test_filter_applies_per_logger(out):
    """A named logger and those below it have their own level, others the general one."""
    configure_logging("json", {"": logging.WARNING, "bge_m3_server": logging.DEBUG}, "cpu", out)
    LOG.debug("kept")
    logging.getLogger("uvicorn").info("dropped")
    assert json_line(out)["fields"]["message"] == "kept"

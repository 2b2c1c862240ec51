"""Log lines for people (text) and for collectors (JSON), from every logger through one handler.

Convention for callers: a constant message, and what varies as fields.

>>> logger.info("embedding request complete", extra={"fields": {"batch_size": 3}})
"""

import enum
import logging
import re
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Literal

import numpy as np
import orjson

from ...domain.validation import replace_lone_surrogates

LogFormat = Literal["json", "text"]
Build = Literal["cpu", "cuda"]

_HANDLER_NAME = "bge_m3_server"
_SELF_HANDLING_LOGGERS = (
    "uvicorn",
    "uvicorn.access",
    "uvicorn.error",
    "litestar",
    "huggingface_hub",
)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MIN_JSON_INTEGER, _MAX_JSON_INTEGER = -(2**63), 2**64 - 1
_NEEDS_QUOTES = re.compile(r'[\s"=]|^$')


def configure_logging(
    log_format: LogFormat, levels: Mapping[str, int], build: Build, stream: IO[str]
) -> None:
    """Send every log record of this process to `stream`; a second call replaces the first.

    Args:
        log_format: ``json`` for one JSON object a line, ``text`` for people.
        levels: level by logger name; the empty name stands for all others.
        build: which kind of onnxruntime is installed, a part of each JSON line.
        stream: where lines go.
    """
    handler = logging.StreamHandler(stream)
    handler.name = _HANDLER_NAME
    handler.setFormatter(JsonFormatter(build) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [known for known in root.handlers if known.name == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    for name in _SELF_HANDLING_LOGGERS:
        _hand_over(logging.getLogger(name))
    for name, threshold in levels.items():
        logging.getLogger(name or None).setLevel(threshold)


def _hand_over(logger: logging.Logger) -> None:
    """Make a library's logger, which may have come with its own handler, use the root's."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``bge_module`` and ``build`` first, the event under ``fields``."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end; no value of any kind breaks it."""
        line = {
            "bge_module": "server",
            "build": self._build,
            "timestamp": _timestamp(record),
            "level": _level(record),
            "fields": _event_fields(record),
            "target": record.name,
        }
        return orjson.dumps(_plain(line), default=str).decode()


class TextFormatter(logging.Formatter):
    """``timestamp LEVEL target: message key=value …``; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of one record, without the last line's end.

        Values cannot forge a line: control characters in them are escaped.
        """
        fields = _event_fields(record)
        message = _one_line(str(fields.pop("message")))
        stack = str(fields.pop("traceback", ""))
        pairs = (f"{_one_line(str(key))}={_text_value(value)}" for key, value in fields.items())
        head = f"{_timestamp(record)} {_level(record):>5} {record.name}: {message}"
        indented = ("    " + _one_line(line) for line in stack.splitlines())
        return "\n".join((" ".join((head, *pairs)), *indented))


def _event_fields(record: logging.LogRecord) -> dict[str, object]:
    """Message, the caller's fields, then what an exception adds."""
    extra = getattr(record, "fields", None)
    fields: dict[str, object] = {"message": None}
    if isinstance(extra, Mapping):
        fields |= extra
    fields["message"] = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        fields["error"] = "".join(traceback.format_exception_only(error)).strip()
        fields["traceback"] = "".join(traceback.format_exception(error))
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    """The short names that collectors of this service's logs already filter by."""
    return {"WARNING": "WARN", "CRITICAL": "ERROR"}.get(record.levelname, record.levelname)


def _text_value(value: object) -> str:
    plain = _plain(value)
    if isinstance(plain, str) and not _NEEDS_QUOTES.search(plain):
        return _one_line(plain)
    return _one_line(orjson.dumps(plain, default=str).decode())


def _one_line(text: str) -> str:
    escaped = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return replace_lone_surrogates(escaped)


def _plain(value: object) -> object:
    """The nearest value that JSON has: a log line is never lost over what it holds."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, enum.Enum):
        value = value.value if isinstance(value.value, str) else value.name
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and _MIN_JSON_INTEGER <= value <= _MAX_JSON_INTEGER:
        return value
    return replace_lone_surrogates(str(value))

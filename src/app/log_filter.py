"""`RUST_LOG`-style directives: a level for every logger, and levels for those that are named."""

import logging
import re
from collections.abc import Mapping

LEVELS: Mapping[str, int] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
"""Names in a log filter → levels of `logging`."""

ROOT = ""
"""Key of the level for every logger that a filter does not name."""


def parse_log_filter(text: str) -> Mapping[str, int]:
    """Levels by logger name from ``level`` and ``logger=level`` directives, comma-separated.

    >>> parse_log_filter("warn,bge_m3_server=debug")
    {'': 30, 'bge_m3_server': 10}

    Raises:
        ValueError: a directive of another form, or a level that does not exist.
    """
    levels = {ROOT: logging.INFO}
    for directive in filter(None, (part.strip() for part in text.split(","))):
        target, separator, level = directive.rpartition("=")
        target, level = target.strip().replace("::", "."), level.strip().lower()
        if level not in LEVELS or (separator and not re.fullmatch(r"[\w.-]+", target)):
            raise ValueError(
                f"invalid log directive {directive!r}: allowed are LEVEL and LOGGER=LEVEL, "
                f"comma-separated, with a level of {', '.join(LEVELS)}; "
                "for example: info,bge_m3_server=debug,uvicorn=warning"
            )
        levels[target] = LEVELS[level]
    return levels

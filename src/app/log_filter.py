"""`RUST_LOG`-style directives: a default level and levels for named loggers."""

from collections.abc import Mapping

_LEVELS = {
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "warning": "WARNING",
    "error": "ERROR",
    "off": "CRITICAL",
}


def parse_log_filter(text: str) -> Mapping[str, str]:
    """``info`` or ``warn,bge_m3_server=debug`` → logger name → stdlib level; "" is the root.

    Raises:
        ValueError: names the directive that is not understood.
    """
    levels = {"": "INFO"}
    for directive in filter(None, map(str.strip, text.split(","))):
        name, _, level = directive.rpartition("=")
        if level.lower() not in _LEVELS:
            raise ValueError(
                f"{directive!r} is not a directive; expected a level ({', '.join(_LEVELS)}) "
                "or logger=level, separated by commas"
            )
        levels[name.strip().replace("::", ".")] = _LEVELS[level.lower()]
    return levels

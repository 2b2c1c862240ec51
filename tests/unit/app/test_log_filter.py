"""Log filters."""

import logging

import pytest
from bge_m3_server.app.log_filter import parse_log_filter


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"": logging.INFO}),
        ("DEBUG", {"": logging.DEBUG}),
        ("trace", {"": logging.DEBUG}),
        ("", {"": logging.INFO}),
        (
            "bge_m3_server=debug, uvicorn=warning",
            {"": logging.INFO, "bge_m3_server": logging.DEBUG, "uvicorn": logging.WARNING},
        ),
        ("error,a::b=warn,", {"": logging.ERROR, "a.b": logging.WARNING}),
        ("off", {"": logging.CRITICAL + 1}),
    ],
)
def test_filters(text, levels):
    """General and per-logger directives, in any order and case."""
    assert parse_log_filter(text) == levels


@pytest.mark.parametrize(
    "text",
    ["verbose", "info,=debug", "uvicorn=loud", "uvicorn", "a b=info", "x[span]=info", "a=b=info"],
)
def test_invalid_filters(text):
    """The message names the directive and the forms that are allowed."""
    with pytest.raises(ValueError, match=r"invalid log directive '.+': allowed are LEVEL and"):
        parse_log_filter(text)

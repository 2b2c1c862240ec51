"""Reading typed values out of environment variables, collecting every problem on the way."""

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

Default = TypeVar("Default")
Value = TypeVar("Value")

MAX_COUNT = 4096
"""More workers, threads, devices or texts per request are a slip of the hand."""

MAX_INTEGER = 1 << 60
"""An EiB; sums of a few such figures still have less than 64 bits."""

MAX_SECONDS = 4_000_000_000
"""126 years; Python's threads wait for at most 292 (`threading.TIMEOUT_MAX`)."""

_TRUE = frozenset({"1", "true", "yes"})
_FALSE = frozenset({"0", "false", "no"})
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,4000}")
"""Python refuses to read more than 4300 digits (`sys.get_int_max_str_digits`)."""


class EnvironmentReader:
    """Typed access to a mapping of variables.

    An unset or empty variable gives the default. A value that cannot be obeyed is noted in
    `problems`, a value that is bent into its range in `notices`; neither raises, so that one start
    reports all of them together.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._asked: set[str] = set()
        self.problems: list[str] = []
        self.notices: list[str] = []

    @property
    def asked(self) -> frozenset[str]:
        """Names of all variables that were read so far."""
        return frozenset(self._asked)

    def text(self, name: str, default: str) -> str:
        """Any text."""
        return self.parsed(name, default, str)

    def parsed(self, name: str, default: Default, parse: Callable[[str], Value]) -> Default | Value:
        """Whatever `parse` makes of it; its `ValueError` message says what is allowed."""
        self._asked.add(name)
        raw = self._environment.get(name)
        if not raw:
            return default
        try:
            return parse(raw)
        except ValueError as error:
            self.problems.append(f"{name}={raw!r}: {error}")
            return default

    def integer(
        self,
        name: str,
        default: Default,
        *,
        minimum: float = 0,
        maximum: float = MAX_INTEGER,
    ) -> int | Default:
        """A whole number within bounds."""

        def parse(raw: str) -> int:
            if not _WHOLE_NUMBER.fullmatch(raw) or not minimum <= int(raw) <= maximum:
                raise ValueError(f"expected a whole number{_between(minimum, maximum)}")
            return int(raw)

        return self.parsed(name, default, parse)

    def seconds(self, name: str, default: Default, *, minimum: int = 0) -> int | Default:
        """Whole seconds of up to `MAX_SECONDS`."""
        return self.integer(name, default, minimum=minimum, maximum=MAX_SECONDS)

    def count(self, name: str, default: Default) -> int | Default:
        """A whole number of up to `MAX_COUNT`; 0 is bent to 1."""
        value = self.integer(name, default, maximum=MAX_COUNT)
        if value == 0:
            self.notices.append(f"{name}=0 is below the minimum; using 1")
            return 1
        return value

    def number(
        self,
        name: str,
        default: Default,
        *,
        minimum: float = -math.inf,
        maximum: float = math.inf,
    ) -> float | Default:
        """A finite number within bounds."""

        def parse(raw: str) -> float:
            allowed = f"expected a finite number{_between(minimum, maximum)}"
            try:
                value = float(raw)
            except ValueError:
                raise ValueError(allowed) from None
            if not math.isfinite(value) or not minimum <= value <= maximum:
                raise ValueError(allowed)
            return value

        return self.parsed(name, default, parse)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """1, true, yes or 0, false, no."""

        def parse(raw: str) -> bool:
            if raw not in _TRUE | _FALSE:
                raise ValueError("expected one of 1, true, yes, 0, false, no")
            return raw in _TRUE

        return self.parsed(name, default, parse)

    def choice(self, name: str, default: Value, choices: Mapping[str, Value]) -> Value:
        """One of the names in `choices`."""

        def parse(raw: str) -> Value:
            if raw not in choices:
                raise ValueError(f"expected one of {', '.join(choices)}")
            return choices[raw]

        return self.parsed(name, default, parse)


def _between(minimum: float, maximum: float) -> str:
    return "" if math.isinf(minimum) else f" of {minimum} to {maximum}"

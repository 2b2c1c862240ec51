"""Numbers in environment variables: none that would overflow later gets in."""

import re

import pytest
from bge_m3_server.app.config import load_config
from bge_m3_server.domain.errors import ConfigError


def config(**environment):
    return load_config(environment, "linux")


def problem(**environment):
    """Why a configuration is refused; nothing if it is not."""
    try:
        config(**environment)
    except ConfigError as error:
        return str(error)
    return ""


def numeric_settings():
    """All variables that want a number, by what they say to a word."""

    class Asked(dict):
        def get(self, name):
            self[name] = None

    load_config(asked := Asked(), "linux")
    return [name for name in asked if "number" in problem(**{name: "many"})]


@pytest.mark.parametrize("digits", [25, 401, 5000])
@pytest.mark.parametrize("name", numeric_settings())
def test_a_number_beyond_all_bounds_is_refused_by_name(name, digits):
    """Whatever would overflow later is a slip of the hand."""
    most_digits = {"BGE_M3_MAX_SEQ_LENGTH": 4000, "BGE_M3_MEMORY_SAFETY_FACTOR": 308}
    if digits <= most_digits.get(name, 0):  # a number that can be read is bent into its range
        (said,) = config(**{name: "9" * digits}).notices
        assert said.startswith(f"{name} out of range")
    else:
        assert re.search(rf"{name}='9+': expected a \w+ number", problem(**{name: "9" * digits}))


def test_all_kinds_of_numbers_are_among_the_numeric_settings():
    """They are found by what the configuration says, so a look at a few of them is due."""
    assert len(numeric_settings()) >= 25
    assert {
        *("BGE_M3_TOKEN_BUDGET", "BGE_M3_AVAILABLE_MEMORY_BYTES", "BGE_M3_ONNX_BATCH_SIZE"),
        *("BGE_M3_REQUEST_TIMEOUT_MS", "BGE_M3_HANG_TIMEOUT_SECS", "BGE_M3_COST_MODEL_A"),
        *("BGE_M3_WORKERS", "BGE_M3_MAX_SEQ_LENGTH", "BGE_M3_MEMORY_SAFETY_FACTOR"),
    } <= {*numeric_settings()}


@pytest.mark.parametrize("value", ["1e308", "1000000000001", "-1", "1e400", "nan"])
@pytest.mark.parametrize("name", ["BGE_M3_COST_MODEL_A", "BGE_M3_COST_MODEL_B"])
def test_coefficients_that_no_cost_model_can_have_are_refused(name, value):
    """They would overflow in the first estimate."""
    assert f"{name}='{value}': expected a finite number of 0 to 1000000000000" in problem(
        **{name: value}
    )


def test_a_cost_model_costs_something():
    """A pass that needs nothing would have no limit."""
    both = problem(BGE_M3_COST_MODEL_A="0", BGE_M3_COST_MODEL_B="0.0")

    assert "BGE_M3_COST_MODEL_A=0 and BGE_M3_COST_MODEL_B=0" in both
    assert config(BGE_M3_COST_MODEL_A="90000", BGE_M3_COST_MODEL_B="0").cost_model_b == 0

"""The error tree."""

import inspect
import re

import pytest
from bge_m3_server.domain import errors


def drawn_parents():
    """Class → parent as drawn in the module's docstring."""
    parents, ancestors = {}, []
    for line in errors.__doc__.splitlines():
        if drawn := re.match(r"    ((?:[│ ]   )*)(?:[├└]── )?(\w+Error)\b", line):
            branch, name = drawn.groups()
            depth = 0 if name == "BgeM3Error" else len(branch) // 4 + 1
            del ancestors[depth:]
            parents[name] = ancestors[-1] if ancestors else "Exception"
            ancestors.append(name)
    return parents


def test_the_tree_is_as_drawn():
    """The picture in the docstring shows every class under its real parent."""
    classes = dict(inspect.getmembers(errors, inspect.isclass))

    assert drawn_parents() == {name: cls.__base__.__name__ for name, cls in classes.items()}


def test_invalid_input_names_the_field():
    """A caller is told which part of the request to mend, where that is known."""
    assert errors.InvalidInputError("too long", param="input[3]").param == "input[3]"
    assert errors.InvalidInputError("no output").param is None
    assert str(errors.InvalidInputError("too long", param="input[3]")) == "too long"


def test_non_finite_output_names_the_text():
    """A failed text is known by its place once there is one."""
    assert errors.NonFiniteOutputError("NaN", index=7).index == 7
    assert errors.NonFiniteOutputError("NaN").index is None
    assert str(errors.NonFiniteOutputError("NaN", index=7)) == "NaN"


@pytest.mark.parametrize("cls", [errors.InvalidInputError, errors.HeadUnavailableError])
def test_only_the_callers_mistakes_are_invalid_input(cls):
    """A mistake of the caller is never taken for a failure of the engine."""
    assert issubclass(cls, errors.InvalidInputError)
    assert not issubclass(cls, errors.InferenceError | errors.UnavailableError)

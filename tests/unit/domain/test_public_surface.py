"""The domain as another service sees it."""

import re
import subprocess
import sys
from pathlib import Path

from bge_m3_server import domain

PAGE = Path(__file__).parents[3] / "docs" / "embedding-the-domain.md"


def run_python(code):
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_public_names_are_those_documented():
    """`__all__` and the page list the same names, each once."""
    _, section = PAGE.read_text("utf-8").split("## Public names")
    first_cells = re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
    documented = re.findall(r"`(\w+)`", " ".join(first_cells))

    assert sorted(documented) == sorted(domain.__all__)
    assert len(set(documented)) == len(documented)


def test_nothing_public_is_left_out():
    """Every class and function that the package imports for its callers is in `__all__`."""
    exported = {
        name for name, value in vars(domain).items() if not name.startswith("_") and callable(value)
    }

    assert exported == set(domain.__all__)


def test_public_names_say_what_they_are():
    """Each has a docstring."""
    assert [name for name in domain.__all__ if not getattr(domain, name).__doc__] == []


def test_the_documented_example_runs():
    """The page's program prints what the page says it prints."""
    page = PAGE.read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)

    assert run_python(program) == printed


def test_the_domain_needs_attrs_and_numpy_only():
    """Importing it loads no server, no engine and no tokenizer."""
    loaded = run_python(
        "import sys; before = set(sys.modules)\n"
        "import bge_m3_server.domain.testing\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )

    outside = set(loaded.split()) - sys.stdlib_module_names
    # numpy's compiled parts register modules of Cython's own making.
    assert {name for name in outside if "cython" not in name.lower()} == {
        "bge_m3_server",
        "attr",
        "attrs",
        "numpy",
    }

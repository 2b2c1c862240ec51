"""A virtual environment for each group of peers, made from its pinned requirements."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.performance.contenders import PEERS, PRODUCT, product_python

PACKAGES = (
    *("FlagEmbedding", "bge-m3-lite", "infinity_emb", "sentence-transformers"),
    *("fastapi", "numpy", "onnxruntime", "openvino", "optimum-intel", "optimum-onnx"),
    *("tokenizers", "torch", "transformers", "uvicorn"),
)
INSTALL_SECONDS = 1800


class UnavailableError(Exception):
    """A contender cannot take part; the message is the reason, in one line."""


def ensure_environment(name: str, cache_dir: Path) -> Path:
    """The interpreter of `name`'s environment, installed below `cache_dir` if it is not there yet.

    Raises:
        UnavailableError: pip could not install it.
    """
    if name == PRODUCT:
        return product_python()
    requirements = PEERS / f"{name}.txt"
    venv = cache_dir / "environments" / name
    stamp = venv / "requirements.sha256"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    python = venv / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    print(f"installing {name} into {venv} ...", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    commands = (
        [sys.executable, "-m", "venv", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
    )
    for command in commands:
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"not installed after {INSTALL_SECONDS} s") from None
        except subprocess.CalledProcessError as error:
            raise UnavailableError(f"cannot be installed: {last_line(error.stderr)}") from None
    stamp.write_text(digest)
    return python


def installed_versions(python: Path) -> Mapping[str, str]:
    """Versions of the packages that matter, in the environment of `python`."""
    script = (
        "import importlib.metadata as m, json, platform, sys\n"
        "names = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(), **names}))"
    )
    answer = subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True)
    installed = json.loads(answer.stdout)
    return {name: installed[name] for name in ("python", *PACKAGES) if name in installed}


def last_line(text: str) -> str:
    """The last line that says anything, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"

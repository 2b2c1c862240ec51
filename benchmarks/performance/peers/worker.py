"""One engine in a process of its own: JSON lines on standard input and output.

It says ``{"ready": true}`` when loaded; then each ``{"texts": [...]}`` is answered with
``{"seconds": ..., "dimensions": ..., "vectors": <base64 of little-endian float32>}``. With
``--prepare`` it only makes the files that the engine needs beside the checkpoint. Runs in the
environment of the engine, so it imports nothing of this repository but `engines`.

    python worker.py flag_embedding .cache/bench/checkpoint
"""

import argparse
import base64
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from engines import ENGINES, PREPARATIONS


def main() -> None:
    """Prepare, or load and answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prepare", action="store_true")
    arguments = parser.parse_args()
    if arguments.prepare:
        finished = arguments.directory / "exports" / f"{arguments.engine}.finished"
        if arguments.engine in PREPARATIONS and not finished.exists():
            PREPARATIONS[arguments.engine](arguments.directory)
            finished.parent.mkdir(exist_ok=True)
            finished.touch()
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    embed = ENGINES[arguments.engine](arguments.directory, arguments.threads)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        started = time.perf_counter()
        vectors = np.asarray(embed(texts), dtype="<f4")
        seconds = time.perf_counter() - started
        answer = {
            "seconds": seconds,
            "dimensions": vectors.shape[1],
            "vectors": base64.b64encode(vectors.tobytes()).decode(),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

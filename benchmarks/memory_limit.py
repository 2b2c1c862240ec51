"""Does the server's budget hold where the kernel kills?

Starts `bge-m3-server serve` in a cgroup with a hard memory limit (version 1, as root), waits until
its probe has ended, and sends mixed requests over HTTP, several at a time: 1-256 texts of up to
8192 tokens, both spread evenly over their logarithms. The tokens of one request are bounded, for
machines of few cores. Every answer must be 200, or 413 with the figures; nothing may be killed; and
the peak must stay within the budget that the server announced.

    .venv/bin/python -m benchmarks.synthetic_bge_m3 .cache/synthetic
    .venv/bin/python -m benchmarks.memory_limit .cache/synthetic --limit-mib 6144

Settings of the server are taken from the environment, or from --set BGE_M3_NAME=VALUE.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx
import numpy as np
from bge_m3_server.adapters.memory.cgroup import parse_membership

from tests.support.server_process import ServerProcess, running_server

MOUNT = Path("/sys/fs/cgroup/memory")
MIB = 2**20
SAMPLE_SECONDS = 0.005
PROBE_SECONDS = 600.0
SPECIAL_TOKENS = 2
REFUSAL = re.compile(
    r"input\[\d+\] has \d+ tokens, which need \d+ MiB of workspace; "
    r"this server has \d+ MiB for it: send texts of at most \d+ tokens"
)


@attrs.define
class Peaks:
    """The most that was seen, in bytes.

    `resident`: of the server process, mapped files included. `held`: of the group, without page
    cache. `usage`: of the group, with page cache, by the kernel's own count. `cache`: page cache at
    the end.
    """

    resident_bytes: int = 0
    held_bytes: int = 0
    usage_bytes: int = 0
    cache_bytes: int = 0


@attrs.define
class Report:
    """What was asked and answered, and what it took.

    `wrong`: answers that are neither 200 with all vectors nor 413 with the figures.
    `limit_hits`: times the group met its limit, which page cache alone may do: the kernel drops it.
    """

    limit_bytes: int
    tuning: Mapping[str, object] = attrs.field(factory=dict)
    answers: Counter[int] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    refusal: str = ""
    served_texts: int = 0
    served_tokens: int = 0
    longest_served_tokens: int = 0
    shortest_refused_tokens: int | None = None
    seconds: float = 0.0
    peaks: Peaks = attrs.field(factory=Peaks)
    limit_hits: int = 0
    kills: int = 0
    is_alive: bool = False

    @property
    def budget_bytes(self) -> int:
        """What the server said it needs at most."""
        return int(str(self.tuning["worst_case_peak_bytes"]))

    def problems(self) -> list[str]:
        """Everything that must not be."""
        peaks = self.peaks
        checks = {
            "the kernel killed": self.kills > 0,
            "the server is gone": not self.is_alive,
            f"resident {peaks.resident_bytes} above the budget": peaks.resident_bytes
            > self.budget_bytes,
            f"held {peaks.held_bytes} above the budget": peaks.held_bytes > self.budget_bytes,
            "the budget is above the limit": self.budget_bytes > self.limit_bytes,
            f"{len(self.wrong)} wrong answers, the first: {self.wrong[:1]}": bool(self.wrong),
            "nothing was served": not self.answers[200],
        }
        return [problem for problem, is_so in checks.items() if is_so]


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A cgroup v1 below this process's own, gone at the end.

    Raises:
        OSError: it cannot be made here.
    """
    own = parse_membership(Path("/proc/self/cgroup").read_text()).get("memory", "/")
    group = MOUNT / own.strip("/") / f"bge-m3-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def requests(count: int, request_tokens: int, max_tokens: int) -> Iterator[list[int]]:
    """Tokens of the texts of each request; the first two are the corners of what is asked."""
    generator = np.random.default_rng(4)

    def spread(high: int, size: int) -> list[int]:
        drawn = np.exp(generator.uniform(0, np.log(high), size)).round().astype(int)
        return [int(number) for number in np.maximum(drawn, 1)]

    yield [max_tokens]
    yield [SPECIAL_TOKENS] * 256
    for _ in range(count - 2):
        (texts,), (longest,) = spread(256, 1), spread(max_tokens, 1)
        lengths = [longest, *spread(longest, texts - 1)]
        lengths = [max(length, SPECIAL_TOKENS) for length in lengths]
        fitting = int(np.searchsorted(np.cumsum(lengths), request_tokens, side="right"))
        yield lengths[: max(1, fitting)]


def run(
    group: Path, settings: Mapping[str, str], *, count: int, request_tokens: int, clients: int
) -> Report:
    """Start the server in `group`, and let `clients` ask `count` requests."""
    report = Report(int((group / "memory.limit_in_bytes").read_text()))
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "BGE_M3_CACHE_DIR": cache,
            "BGE_M3_DISABLE_AUTO_BUDGET": "",
            "BGE_M3_IDLE_TIMEOUT_SECS": "0",
            **settings,
        }
        with running_server(environment, prefix=_inside(group)) as server:
            health = _wait_for_probe(server)
            report.tuning = health["tuning"]
            watcher = _Watcher(server.process.pid, group)
            watcher.start()
            started = time.monotonic()
            asked = requests(count, request_tokens, health["max_seq_length"])
            _ask_all(server, report, asked, clients)
            report.seconds = round(time.monotonic() - started, 1)
            report.peaks = watcher.stop()
            report.is_alive = server.process.poll() is None
            if report.is_alive:
                report.tuning = httpx.get(f"{server.url}/health").json()["tuning"]
            report.limit_hits = int((group / "memory.failcnt").read_text())
            report.kills = _field((group / "memory.oom_control").read_text(), "oom_kill")
    return report


def _inside(group: Path) -> list[str]:
    """A command that runs another one in the group."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]


def _wait_for_probe(server: ServerProcess) -> dict[str, Any]:
    """What `/health` says afterwards."""
    deadline = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < deadline:
        health: dict[str, Any] = httpx.get(f"{server.url}/health").json()
        if health["tuning"]["probe_status"] != "running":
            return health
        time.sleep(0.5)
    sys.exit(f"the probe has not ended within {PROBE_SECONDS:.0f} s")


def _ask_all(
    server: ServerProcess, report: Report, asked: Iterable[list[int]], clients: int
) -> None:
    lock = threading.Lock()

    def ask(lengths: list[int]) -> None:
        texts = [" ".join(["w1"] * (length - SPECIAL_TOKENS)) for length in lengths]
        body = {"input": texts, "encoding_format": "base64"}
        try:
            answer = client.post("/v1/embeddings", json=body)
        except httpx.HTTPError as error:
            with lock:
                report.wrong.append(f"{type(error).__name__}: {error}")
            return
        with lock:
            _note(report, lengths, answer)

    with (
        httpx.Client(base_url=server.url, timeout=None) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        list(pool.map(ask, asked))


def _note(report: Report, lengths: list[int], answer: httpx.Response) -> None:
    report.answers[answer.status_code] += 1
    longest = max(lengths)
    if answer.status_code == httpx.codes.OK and len(answer.json()["data"]) == len(lengths):
        report.served_texts += len(lengths)
        report.served_tokens += sum(lengths)
        report.longest_served_tokens = max(report.longest_served_tokens, longest)
    elif answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE and REFUSAL.search(answer.text):
        report.refusal = report.refusal or answer.json()["error"]["message"]
        known = report.shortest_refused_tokens
        report.shortest_refused_tokens = longest if known is None else min(known, longest)
    else:
        report.wrong.append(f"{answer.status_code}: {answer.text[:300]}")


class _Watcher(threading.Thread):
    """Reads often: the server itself resets the high-water mark of its process at each pass."""

    def __init__(self, pid: int, group: Path) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._group = group
        self._is_over = threading.Event()
        self._peaks = Peaks()

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self._look()

    def stop(self) -> Peaks:
        self._is_over.set()
        self.join()
        self._peaks.usage_bytes = int((self._group / "memory.max_usage_in_bytes").read_text())
        self._peaks.cache_bytes = _field((self._group / "memory.stat").read_text(), "total_cache")
        return self._peaks

    def _look(self) -> None:
        peaks = self._peaks
        with contextlib.suppress(OSError):  # a process that was killed has no status
            resident_bytes = _field(self._status.read_text(), "VmHWM:") * 1024
            peaks.resident_bytes = max(peaks.resident_bytes, resident_bytes)
        stat = (self._group / "memory.stat").read_text()
        peaks.held_bytes = max(peaks.held_bytes, _field(stat, "total_rss"))


def _field(text: str, name: str) -> int:
    """The number after a name at the beginning of a line; 0 if there is none."""
    fields = (line.split() for line in text.splitlines())
    return next((int(field[1]) for field in fields if field and field[0] == name), 0)


def _page(report: Report) -> str:
    peaks, tuning = report.peaks, report.tuning
    answers = ", ".join(f"{number} x {status}" for status, number in sorted(report.answers.items()))
    page = (
        f"limit {report.limit_bytes / MIB:.0f} MiB, budget {report.budget_bytes / MIB:.0f} MiB "
        f"({tuning['memory_source']}); {tuning['coefficients_source']}: {tuning['reason']}\n"
        f"resident at most {peaks.resident_bytes / MIB:.0f} MiB; the group held at most "
        f"{peaks.held_bytes / MIB:.0f} MiB, {peaks.usage_bytes / MIB:.0f} MiB with page cache "
        f"(at the end {peaks.cache_bytes / MIB:.0f} MiB)\n"
        f"kills: {report.kills}; the limit was met {report.limit_hits} times\n"
        f"answers: {answers} in {report.seconds} s; {report.served_texts} texts, "
        f"{report.served_tokens} tokens; excess passes: {tuning['excess_passes']}\n"
        f"longest text served: {report.longest_served_tokens} tokens; "
        f"shortest refused: {report.shortest_refused_tokens}"
    )
    return f"{page}\nrefused: {report.refusal}" if report.refusal else page


def _setting(raw: str) -> tuple[str, str]:
    name, separator, value = raw.partition("=")
    if not (separator and name.startswith("BGE_M3_")):
        raise argparse.ArgumentTypeError(f"expected BGE_M3_NAME=VALUE, got {raw!r}")
    return name, value


def main() -> None:
    """Make the group, run, print; the exit code says whether the budget held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit-mib", type=int, default=6144)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--request-tokens", type=int, default=8192)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    inherited = {name: value for name, value in os.environ.items() if name.startswith("BGE_M3_")}
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(arguments.limit_mib * MIB))
        except OSError as error:
            sys.exit(f"a cgroup v1 memory group is needed and cannot be made: {error}")
        report = run(
            group,
            inherited | {"BGE_M3_MODEL_DIR": str(arguments.directory)} | dict(arguments.set),
            count=arguments.requests,
            request_tokens=arguments.request_tokens,
            clients=arguments.clients,
        )
    problems = report.problems()
    if arguments.json:
        figures = attrs.asdict(report) | {"problems": problems}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(_page(report))
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()

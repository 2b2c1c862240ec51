"""A loopback stand-in for the Hugging Face hub: tiny repositories, the real protocol, and faults.

Small text files are served by the hub itself, with git's hash as their ETag. Large ones are
redirected to a second origin, as the hub does with its CDN; the redirect carries sha256 and size.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs

from tests.support.tiny_models import write_tiny_model

BAAI = "BAAI/bge-m3"
XENOVA = "Xenova/bge-m3"
WEIGHTS = "onnx/model.onnx_data"


@attrs.frozen
class SeenRequest:
    """One request as it arrived; `origin` is ``hub`` or ``cdn``, header names are lower case."""

    origin: str
    method: str
    path: str
    headers: Mapping[str, str]


@attrs.frozen
class Fault:
    """What goes wrong with a file; `times` is how often, None for always.

    `status`: answer with it. `cut_after_bytes`: close the connection there. `content`: serve these
    bytes instead, while the headers still tell of the true ones.
    """

    status: int | None = None
    cut_after_bytes: int | None = None
    content: bytes | None = None
    times: int | None = None


@attrs.define
class HubStandIn:
    """What the stand-in serves and saw. `endpoint` is the value for HF_ENDPOINT."""

    repositories: Mapping[str, Mapping[str, bytes]]
    endpoint: str = ""
    cdn: str = ""
    faults: dict[str, Fault] = attrs.field(factory=dict)
    requests: list[SeenRequest] = attrs.field(factory=list)

    def fault(self, name: str) -> Fault | None:
        """The fault due for the file `name`, used up by the asking."""
        fault = self.faults.get(name)
        if fault is None or fault.times is None:
            return fault
        if fault.times <= 1:
            del self.faults[name]
        else:
            self.faults[name] = attrs.evolve(fault, times=fault.times - 1)
        return fault

    @property
    def file_requests(self) -> list[SeenRequest]:
        """What was asked about files; the hub's library may ask for other things as well."""
        return [request for request in self.requests if "/resolve/" in request.path]

    def content_requests(self, name: str) -> list[SeenRequest]:
        """The GET requests for a file."""
        return [
            request
            for request in self.file_requests
            if request.method == "GET"
            and request.path.endswith(f"/{name}")
            and (request.origin == "cdn" or not is_large(name))
        ]


def is_large(name: str) -> bool:
    """Whether a file is kept outside git."""
    return not name.endswith(".json")


def hub_hash(name: str, content: bytes) -> str:
    """The ETag that the hub gives a file."""
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def tiny_repositories(directory: Path) -> dict[str, dict[str, bytes]]:
    """Both published repositories, in small: files by name, made in `directory`."""
    write_tiny_model(directory / "baai", external_data=True)
    write_tiny_model(directory / "xenova", "last_hidden_state", precision="fp16")
    return {
        BAAI: _files(directory / "baai"),
        XENOVA: {
            name: content
            for name, content in _files(directory / "xenova").items()
            if not name.endswith(".pt")
        },
    }


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@contextlib.contextmanager
def hub_stand_in(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[HubStandIn]:
    """Serve `repositories` on two loopback ports until the block ends."""
    stand_in = HubStandIn(repositories)
    with _server(stand_in) as hub, _server(stand_in) as cdn:
        stand_in.endpoint, stand_in.cdn = hub, cdn
        yield stand_in


@contextlib.contextmanager
def _server(stand_in: HubStandIn) -> Iterator[str]:
    def handler(*arguments: object) -> _Handler:
        return _Handler(*arguments, stand_in=stand_in)

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, stand_in: HubStandIn) -> None:
        self.stand_in = stand_in
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        # A request to a proxy names the host as well; this server is then the proxy.
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        origin = "cdn" if self.stand_in.cdn == f"http://{headers['host']}" else "hub"
        self.stand_in.requests.append(SeenRequest(origin, self.command, path, headers))
        match path.strip("/").split("/", 4):
            case [owner, repository, "resolve", revision, name]:
                pass
            case _:
                self._reply(404)
                return
        content = self.stand_in.repositories.get(f"{owner}/{repository}", {}).get(name)
        if content is None:
            self._reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        redirects = origin == "hub" and is_large(name)
        # Faults of the content wait for the request that asks for it.
        fault = self.stand_in.faults.get(name)
        if fault is not None and (fault.status or (self.command == "GET" and not redirects)):
            fault = self.stand_in.fault(name)
        else:
            fault = None
        if fault is not None and fault.status is not None:
            self._reply(fault.status)
            return
        about = {"X-Repo-Commit": revision, "ETag": f'"{hub_hash(name, content)}"'}
        if redirects:
            about["X-Linked-Etag"] = about["ETag"]
            about["X-Linked-Size"] = str(len(content))
            about["Location"] = f"{self.stand_in.cdn}{path}"
            self._reply(302, about)
            return
        self._send(content, about, fault or Fault())

    def _send(self, content: bytes, headers: dict[str, str], fault: Fault) -> None:
        content = content if fault.content is None else fault.content
        status, start = 200, 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self._reply(416)
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.cut_after_bytes is not None:
            self.wfile.write(body[: fault.cut_after_bytes])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _reply(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

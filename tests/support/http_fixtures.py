"""Fixtures of the HTTP suites: one real server for all of them, its fake engine reset per test."""

import time
from collections.abc import Iterator

import httpx
import pytest
from bge_m3_server.app.http.application import HttpLimits, create_app
from bge_m3_server.domain.embedder import NoTelemetry

from tests.support.fake_service import FakeService
from tests.support.serve import Address, serve

LIMITS = HttpLimits(max_batch=8, max_body_bytes=400_000)


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[FakeService, Address]]:
    service = FakeService()
    app = create_app(service, LIMITS, NoTelemetry(), "1.2.3", time.monotonic)
    with serve(app) as address:
        yield service, address


@pytest.fixture
def service(served: tuple[FakeService, Address]) -> FakeService:
    """The engine behind the server, without any script."""
    served[0].reset()
    return served[0]


@pytest.fixture
def address(served: tuple[FakeService, Address], service: FakeService) -> Address:
    return served[1]


@pytest.fixture(scope="session")
def client(served: tuple[FakeService, Address]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1].url, timeout=20) as client:
        yield client


@pytest.fixture
def http(client: httpx.Client, service: FakeService) -> httpx.Client:
    return client

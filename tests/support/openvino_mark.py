"""Where OpenVINO belongs to the test environment."""

import platform

import pytest

needs_openvino = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"},
    reason="OpenVINO is only used on x86-64; `make test` installs it there",
)
"""On x86-64 a missing package is a failure, not a reason to skip."""

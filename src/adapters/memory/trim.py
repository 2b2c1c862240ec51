"""Giving freed memory back to the system."""

import ctypes
import sys


def trim_heap() -> None:
    """Let glibc return what it keeps for later; elsewhere the allocator does so by itself."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # musl has none
        libc.malloc_trim(0)

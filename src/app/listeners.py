"""Listening sockets that close without resetting those who have just connected."""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable

HANDSHAKE_SECONDS = 0.1
"""So long may a handshake take that has begun before newcomers are turned away."""

_SO_ATTACH_FILTER = 26
"""Linux's ``asm-generic/socket.h``; Python has no name for it."""

_DROP_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of the TCP header that holds the flags
        (0x45, 0, 1, 0x02),  # SYN, with which a connection begins?
        (0x06, 0, 0, 0),  # then drop the segment,
        (0x06, 0, 0, 0xFFFFFFFF),  # else take all of it
    )
)
"""A classic BPF program (``linux/filter.h``: code, jumps if true and if false, operand)."""


def shared(listener_fd: int) -> socket.socket:
    """Another handle of a listening socket, which listens until both are closed."""
    return socket.socket(fileno=os.dup(listener_fd))


def turn_newcomers_away(listener: socket.socket) -> None:
    """Let no connection begin, and those go on that have begun; does nothing but on Linux.

    Else somebody could connect between the last `accept` and the close, and be reset. Whoever is
    not heard asks again, a second later by TCP's rules, and then finds the listener closed.
    """
    if sys.platform != "linux" or listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    program = ctypes.create_string_buffer(_DROP_SYN)
    count = len(_DROP_SYN) // struct.calcsize("HBBI")
    with contextlib.suppress(OSError):  # a kernel without filters
        listener.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", count, ctypes.addressof(program)),
        )


def accept_the_last(listeners: Iterable[socket.socket]) -> list[socket.socket]:
    """Close `listeners`; returns whom the kernel had accepted, and would reset."""
    accepted = []
    for listener in listeners:
        with listener, contextlib.suppress(OSError):  # BlockingIOError: there are no more
            listener.settimeout(0)
            while True:
                with contextlib.suppress(ConnectionAbortedError):  # one who has left again
                    accepted.append(listener.accept()[0])
    return accepted

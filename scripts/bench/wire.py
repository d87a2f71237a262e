"""Bytes on the wire as the kernel counted them, whatever any engine's own ledger says.

Every TCP socket of this process is asked for its TCP_INFO. The counters are those of linux/tcp.h and count payload:
no headers, and retransmitted bytes are taken out again, so a sender's figure equals its receiver's.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

# struct tcp_info up to tcpi_bytes_retrans: 8 bytes of state and options, 24 u32 (tcpi_rto .. tcpi_total_retrans),
# 4 u64 (tcpi_pacing_rate, tcpi_max_pacing_rate, tcpi_bytes_acked, tcpi_bytes_received), 6 u32 (tcpi_segs_out ..
# tcpi_data_segs_out), 4 u64 (tcpi_delivery_rate .. tcpi_sndbuf_limited), 2 u32 (tcpi_delivered, tcpi_delivered_ce),
# 2 u64 (tcpi_bytes_sent, tcpi_bytes_retrans).
_TCP_INFO = struct.Struct("=8x 24I 2Q 2Q 6I 4Q 2I 2Q")
_BYTES_RECEIVED_FIELD = 27
_BYTES_SENT_FIELD = -2
_BYTES_RETRANSMITTED_FIELD = -1


class TcpBytes(NamedTuple):
    """Payload bytes through a set of TCP sockets since each was opened."""

    sent: int
    received: int


def socket_bytes(tcp_socket: socket.socket) -> TcpBytes:
    """Payload bytes that went through one TCP socket."""
    raw = tcp_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(raw) < _TCP_INFO.size:
        raise OSError(
            f"TCP_INFO has {len(raw)} bytes, {_TCP_INFO.size} are needed: Linux 4.19 or newer counts bytes sent"
        )
    fields = _TCP_INFO.unpack(raw)
    return TcpBytes(
        sent=fields[_BYTES_SENT_FIELD] - fields[_BYTES_RETRANSMITTED_FIELD],
        received=fields[_BYTES_RECEIVED_FIELD],
    )


def tcp_bytes() -> TcpBytes:
    """Payload bytes sent and received by all TCP sockets open in this process.

    A closed socket takes its bytes with it, so measure a difference while the connections live. For an exact figure
    put a barrier before each reading: what was written to a socket may still wait in the kernel to be sent.
    """
    sent = received = 0
    for descriptor in _socket_descriptors():
        with _duplicate(descriptor) as any_socket:
            if _is_tcp(any_socket):
                one = socket_bytes(any_socket)
                sent += one.sent
                received += one.received
    return TcpBytes(sent, received)


def _socket_descriptors() -> list[int]:
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            # Closed since it was listed, as the listing's own descriptor always is.
            continue
        if target.startswith("socket:"):
            descriptors.append(int(name))
    return descriptors


def _duplicate(descriptor: int) -> socket.socket:
    """A Python socket on a copy of the descriptor, which can be closed while the owner goes on using its own."""
    return socket.socket(fileno=os.dup(descriptor))


def _is_tcp(any_socket: socket.socket) -> bool:
    return any_socket.family in (socket.AF_INET, socket.AF_INET6) and any_socket.proto == socket.IPPROTO_TCP

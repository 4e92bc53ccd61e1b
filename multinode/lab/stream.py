"""One TCP stream between two nodes, run as a program: `receive` prints its port, then what arrived; `send` sends.

Standard library only, and nothing of ours: it runs as `python -I -S` in a node's network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 10.0


def receive(address: str, skip_s: float, skip_bytes: int, window_s: float) -> None:
    """Take one stream, pass over its beginning, and print how many bytes came in how many seconds after that.

    Passed over are `skip_s` seconds and `skip_bytes` bytes, whichever takes longer: slow start, full token buckets.
    """
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        os.write(1, b"%d\n" % server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_TIMEOUT_S)
        buffer = bytearray(_CHUNK_BYTES)
        began = time.monotonic()
        total = counted_from = 0
        window_began = None
        while size := connection.recv_into(buffer):
            now = time.monotonic()
            total += size
            if window_began is None:
                if now - began >= skip_s and total >= skip_bytes:
                    window_began, counted_from = now, total
            elif now - window_began >= window_s:
                answer = {"size_bytes": total - counted_from, "time_s": now - window_began}
                os.write(1, json.dumps(answer).encode())
                return


def send(address: str, port: int) -> None:
    """Send until the receiver has had enough."""
    chunk = bytes(_CHUNK_BYTES)
    enough = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with enough, socket.create_connection((address, port), timeout=_TIMEOUT_S) as connection:
        while True:
            connection.sendall(chunk)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        send(sys.argv[2], int(sys.argv[3]))

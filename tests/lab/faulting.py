"""Seeing from another node, or over SSH, what a fault does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess

from multinode.lab.cluster import require_lab
from multinode.lab.nodes import SSH_CONFIG
from multinode.lab.state import LabNode
from tests.equipment.faults import Fault, clear_faults, make_fault

from .conftest import DEADLINE_S

Command = Callable[..., CompletedProcess[str]]
Make = Callable[[Fault], None]

DROPPED = 124
REFUSED = 1
CONNECTED = 0

# Answers each connection with one byte after it has read as many as asked for.
_SERVER = """\
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    left = int(sys.argv[2])
    while left and (chunk := connection.recv(min(left, 65536))):
        left -= len(chunk)
    connection.send(b"." * (left == 0))
    connection.close()
"""
_CLIENT = """\
import socket, sys
address, port, size, timeout_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
connection = socket.create_connection((address, port), timeout=timeout_s)
try:
    connection.sendall(bytes(size))
    print("arrived" if connection.recv(1) else "closed")
except TimeoutError:
    print("lost")
"""


def _on_network_of(node: LabNode) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{node.namespace}", sys.executable]


@contextmanager
def server(node: LabNode, port: int, size_bytes: int = 0) -> Iterator[None]:
    argv = [*_on_network_of(node), "-c", _SERVER, str(port), str(size_bytes)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


def connect(source: LabNode, address: str, port: int, seconds: float = 10.0) -> int:
    attempt = ["timeout", str(seconds), "bash", "-c", f"</dev/tcp/{address}/{port}"]
    argv = ["nsenter", f"--net=/run/netns/{source.namespace}", *attempt]
    return subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=DEADLINE_S, check=False).returncode


def send(node: LabNode, address: str, port: int, size_bytes: int, seconds: float = 10.0) -> str:
    argv = [*_on_network_of(node), "-c", _CLIENT, address, str(port), str(size_bytes), str(seconds)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout.strip()


def quick_ssh(node: str) -> CompletedProcess[str]:
    """A client that does not wait long."""
    options = ["-F", str(SSH_CONFIG), "-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
    return subprocess.run(
        ["ssh", *options, node, "hostname"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@contextmanager
def faults(*made: Fault) -> Iterator[None]:
    """While inside, the lab has these faults."""
    lab = require_lab()
    try:
        for fault in made:
            make_fault(lab, fault)
        yield
    finally:
        clear_faults(lab)

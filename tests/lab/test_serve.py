"""A server over both nodes: a program that reads the options of `vllm serve`, meets, and answers requests."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab
from tests.lab.launching import DEADLINE_S, Command

pytestmark = pytest.mark.lab

# Rank 0 hears from the others at the master's address before it answers requests; those answer none.
VLLM = """\
#!/usr/bin/env python3
import argparse, os, socket, time
parser = argparse.ArgumentParser()
parser.add_argument("verb")
parser.add_argument("model")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--nnodes", type=int)
parser.add_argument("--node-rank", type=int)
parser.add_argument("--master-addr")
parser.add_argument("--master-port", type=int)
parser.add_argument("--headless", action="store_true")
args = parser.parse_args()
print("serving", args, os.environ["VLLM_HOST_IP"], flush=True)
meeting = (args.master_addr, args.master_port)
if args.headless:
    for _ in range(300):
        try:
            with socket.create_connection(meeting) as peer:
                peer.sendall(f"rank {args.node_rank} at {os.environ['VLLM_HOST_IP']}".encode())
            break
        except OSError:
            time.sleep(0.1)
    time.sleep(600)
with socket.create_server(meeting) as store:
    workers = [store.accept()[0].makefile().read() for _ in range(args.nnodes - 1)]
with socket.create_server(("", args.port)) as server:
    while True:
        server.accept()[0].sendall(f"{args.model} by rank {args.node_rank} and {workers}".encode())
"""
READY = re.compile(r"node0 ready: listens on port 8123\b")


@pytest.fixture
def setup(shared_dir: Path) -> str:
    """What puts the program on the nodes' PATH."""
    path = shared_dir / "vllm"
    path.write_text(VLLM)
    path.chmod(0o755)
    return f"PATH={shared_dir}:$PATH"


def test_a_server_has_its_ranks_and_addresses_and_is_told_ready(lab: Lab, command: Command, setup: str) -> None:
    options = ("launch", "--hosts", "lab", "--setup", setup, "--no-check")
    typed = ("vllm", "serve", "m", "--port", "8123", "--nnodes", "2", "--node-rank", "0", "--master-addr", "192.0.2.1")
    with command.running(*options, "--", *typed) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if READY.search(line):
                break
        assert "the hostfile overrides --nnodes 2 --node-rank 0 --master-addr 192.0.2.1" in "".join(said)
        first, second = (node.addr for node in lab.nodes)
        asked = subprocess.run(
            [*ns_command(lab.nodes[1]), "bash", "-c", f"cat < /dev/tcp/{first}/8123"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        assert asked.stdout == f"m by rank 0 and ['rank 1 at {second}']"
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=DEADLINE_S) == 130

"""Stands in for torchrun: a node's ranks with its variables, each in a session of its own, and its report of a failure.

As torchrun does, it ends the node's other ranks when one fails, and waits for the other nodes at the beginning and at
the end. Where the variable REAL_TORCH is set, its workers do not find this package and have the installed torch;
their rank 0 holds the store, at the next port.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from .meeting import Hub, Member

_STAND_IN = str(Path(__file__).parents[2])
_POLL_S = 0.05
_CLOSE_S = 30.0
# Of each node's number of workers, in the sum by which the nodes tell each other.
_BITS = 6
_REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
{script} FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : {host}
  rank      : {rank} (local_rank: {local_rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : {message}
============================================================
"""
_PORT_TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


class Launcher:
    """The ranks of this node."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._workers: list[subprocess.Popen[bytes]] = []
        self._first_rank, self._world_size = 0, 0

    def run(self) -> int:
        """Start them and wait for them; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        options = self._options
        if options.node_rank == 0:
            try:
                Hub(options.master_addr, options.master_port).start()
            except OSError:
                sys.exit(_PORT_TAKEN.format(port=options.master_port))
        nodes = Member("nodes", options.nnodes, options.master_addr, options.master_port)
        told = nodes.add_up(options.nproc_per_node << _BITS * options.node_rank)
        counts = [(told >> _BITS * node) % (1 << _BITS) for node in range(options.nnodes)]
        self._first_rank, self._world_size = sum(counts[: options.node_rank]), sum(counts)
        for local_rank in range(options.nproc_per_node):
            self._workers.append(self._start(local_rank))
        failed = self._wait()
        if failed is not None:
            self._close()
            sys.stderr.write(self._report(failed))
            return 1
        try:
            nodes.add_up(0)
        except RuntimeError:
            sys.stderr.write("W the exit barrier failed: another launcher is gone\n")
        return 0

    def _start(self, local_rank: int) -> subprocess.Popen[bytes]:
        options = self._options
        variables = {
            "LOCAL_RANK": local_rank,
            "RANK": self._first_rank + local_rank,
            "LOCAL_WORLD_SIZE": options.nproc_per_node,
            "WORLD_SIZE": self._world_size,
            "GROUP_RANK": options.node_rank,
            "GROUP_WORLD_SIZE": options.nnodes,
            "MASTER_ADDR": options.master_addr,
            "MASTER_PORT": options.master_port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        if "REAL_TORCH" in os.environ:
            path = [one for one in os.environ["PYTHONPATH"].split(os.pathsep) if one != _STAND_IN]
            variables |= {
                "PYTHONPATH": os.pathsep.join(path),
                "MASTER_PORT": options.master_port + 1,
                "TORCHELASTIC_USE_AGENT_STORE": False,
            }
        return subprocess.Popen(
            [sys.executable, "-u", *(["-m"] if options.module else []), options.script, *options.arguments],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            start_new_session=True,
        )

    def _wait(self) -> int | None:
        """Local rank of the first worker that failed; None where all ended well."""
        while True:
            codes = [worker.poll() for worker in self._workers]
            for local_rank, code in enumerate(codes):
                if code:
                    return local_rank
            if None not in codes:
                return None
            time.sleep(_POLL_S)

    def _close(self) -> None:
        end = time.monotonic() + _CLOSE_S
        for worker in self._workers:
            if worker.poll() is None:
                sys.stderr.write(f"W Sending process {worker.pid} closing signal SIGTERM\n")
                os.killpg(worker.pid, signal.SIGTERM)
        for worker in self._workers:
            try:
                worker.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._close()
        sys.exit(f"torch.distributed.elastic.multiprocessing.api.SignalException: Process {os.getpid()} got {number}")

    def _report(self, local_rank: int) -> str:
        options, worker = self._options, self._workers[local_rank]
        code = worker.returncode
        said = f"Signal {-code} received by PID {worker.pid}" if code < 0 else "To enable traceback see: ..."
        return _REPORT.format(
            script=options.script,
            time=time.strftime("%Y-%m-%d_%H:%M:%S"),
            host=socket.gethostname(),
            rank=self._first_rank + local_rank,
            local_rank=local_rank,
            code=code,
            pid=worker.pid,
            message=said,
        )


def main() -> int:
    """The command line, as a plan has it."""
    parser = argparse.ArgumentParser()
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port", "--max-restarts"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--master-addr")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return Launcher(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())

"""The verb `diagnose` of a real agent, on real workers: what they do, where they stand, and that they go on with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multinode.node.hang.diagnose import ras_target

from .localnode import LocalNode, Record, is_alive, wait_until

RUN = "hang.0"
# What torchrun is to its workers: it starts them with their ranks and waits.
LAUNCHER = """
import os, subprocess, sys
def start(rank):
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return subprocess.Popen([sys.executable, sys.argv[1]], env=env)
workers = [start(rank) for rank in range(int(sys.argv[2]))]
print("launched", flush=True)
for worker in workers:
    worker.wait()
"""
SLEEPER = """
import time
def load_batch():
    print("asleep", flush=True)
    time.sleep(600)
load_batch()
"""


@contextmanager
def running(node: LocalNode, worker: str, *, count: int = 1, profile: bool = True) -> Iterator[None]:
    """A run whose workers have all said `asleep`."""
    script = node.home / "train.py"
    script.write_text(worker)
    launcher = node.home / "launch.py"
    launcher.write_text(LAUNCHER)
    argv = [sys.executable, str(launcher), str(script), str(count)]
    request = node.request(argv, RUN, profile=profile, detach=True)
    assert node.call("supervise", request)[0] == 0
    try:
        log = node.run_dir(RUN) / "log"
        wait_until(lambda: log.read_bytes().count(b"asleep") == count)
        yield
    finally:
        node.call("stop", {"run_id": RUN, "grace_s": 0.0})


def diagnose(node: LocalNode, *, env: dict[str, str] | None = None) -> Record:
    code, (record,) = node.call("diagnose", {"run_id": RUN}, env=env)
    assert (code, record["kind"]) == (0, "diagnosis")
    return record


def of_rank(record: Record, rank: int | None) -> Record:
    (found,) = (process for process in record["processes"] if process["rank"] == rank)
    return dict(found)


def test_a_worker_that_sleeps_in_a_c_call_shows_its_stack_and_sleeps_on(node: LocalNode) -> None:
    with running(node, SLEEPER, count=2):
        for _ in range(2):
            record = diagnose(node)
            for rank in (0, 1):
                process = of_rank(record, rank)
                assert (process["role"], process["local_rank"]) == ("worker", rank)
                assert (process["state"], process["state_words"]) == ("S", "sleeping")
                assert process["cpu_s"] < process["looked_s"] / 2
                assert process["stack_source"] == "faulthandler"
                assert process["stack"].count("line 5 in load_batch") == 1
        assert b"Traceback" not in (node.run_dir(RUN) / "log").read_bytes()
        assert is_alive(of_rank(record, 0)["pid"])


def test_a_worker_that_spins_is_seen_to_compute(node: LocalNode) -> None:
    with running(node, "print('asleep', flush=True)\nwhile True: pass\n"):
        process = of_rank(diagnose(node), 0)
    assert process["state"] == "R"
    assert process["cpu_s"] > 0.05
    assert "line 2 in <module>" in process["stack"]


def test_a_stopped_worker_is_told_by_its_state_and_gets_no_signal(node: LocalNode) -> None:
    with running(node, SLEEPER, count=2):
        pid = of_rank(diagnose(node), 1)["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: of_rank(diagnose(node), 1)["state"] == "T")
        record = diagnose(node)
        stopped = of_rank(record, 1)
        pending = Path(f"/proc/{pid}/status").read_text()
        assert "ShdPnd:\t0000000000000000" in pending
        os.kill(pid, signal.SIGCONT)
    assert (stopped["state_before"], stopped["state_words"]) == ("T", "stopped")
    assert "stopped" in stopped["stack"]["reason"]
    assert "load_batch" in of_rank(record, 0)["stack"]


def test_a_worker_without_instrumentation_is_never_signalled(node: LocalNode) -> None:
    with running(node, SLEEPER, profile=False):
        process = of_rank(diagnose(node), 0)
        assert is_alive(process["pid"])
    assert "stack_source" not in process
    assert "py-spy is not on PATH" in process["stack"]["reason"]


def test_a_worker_that_has_become_another_program_is_not_signalled(node: LocalNode) -> None:
    # Pid and start time remain, and the handler does not: the signal would end it.
    with running(node, "import os\nos.execlp('sh', 'sh', '-c', 'echo asleep; sleep 600; true')\n"):
        process = of_rank(diagnose(node), 0)
        assert is_alive(process["pid"])
    assert process["stack"]["is"] == "unknown"


def test_without_instrumentation_py_spy_is_asked_where_it_is_on_path(node: LocalNode) -> None:
    folder = node.home / "bin"
    folder.mkdir()
    (folder / "py-spy").write_text('#!/bin/sh\necho "Thread 1 (idle): \\"MainThread\\""\necho "    asked $*"\n')
    (folder / "py-spy").chmod(0o700)
    with running(node, SLEEPER, profile=False):
        process = of_rank(diagnose(node, env={"PATH": f"{folder}:{os.environ['PATH']}"}), 0)
    assert process["stack_source"] == "py-spy"
    assert f"asked dump --pid {process['pid']}" in process["stack"]


def test_the_launcher_is_shown_and_what_a_worker_starts_is_not(node: LocalNode) -> None:
    worker = "import os, time\nif os.fork(): print('asleep', flush=True)\ntime.sleep(600)\n"
    for profile in (True, False):
        with running(node, worker, profile=profile):
            record = diagnose(node)
        assert [(process["role"], process["rank"]) for process in record["processes"]] == [
            ("launcher", None),
            ("worker", 0),
        ]
        node.call("clean", {"run_ids": [RUN]})


def test_a_worker_that_has_ended_leaves_its_last_step(node: LocalNode) -> None:
    worker = """
import os, time
path = os.path.join(os.environ["MULTINODE_SAMPLES"], "rank-%s.jsonl" % os.environ["RANK"])
with open(path, "w") as file:
    for step in range(1, 4):
        file.write('{"kind": "step", "rank": %s, "step": %d, "time_s": 5.5}\\n' % (os.environ["RANK"], step))
    file.write('{"kind": "loss"}\\n{"kind": "st')
print("asleep", flush=True)
if os.environ["RANK"] == "0": time.sleep(600)
"""
    with running(node, worker, count=2):
        # Its launcher waits for the first, so the second is a zombie, which has no environment any more.
        wait_until(lambda: any(process["state"] == "Z" for process in diagnose(node)["processes"]))
        record = diagnose(node)
    assert record["last_steps"] == [{"rank": rank, "step": 3, "time_s": 5.5} for rank in (0, 1)]
    assert of_rank(record, 1)["state_words"] == "zombie"


def test_connections_are_shown_with_what_waits_in_them(node: LocalNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        worker = (
            f"import socket, time\npeer = socket.create_connection(('127.0.0.1', {port}))\n"
            "print('asleep', flush=True)\ntime.sleep(600)\n"
        )
        with running(node, worker), server.accept()[0] as connection:
            connection.sendall(b"x" * 1000)
            sockets = of_rank(diagnose(node), 0)["sockets"]
    assert (sockets["established"], sockets["connecting"]) == (1, 0)
    assert sockets["listed"] == [
        {"state": "established", "peer": f"127.0.0.1:{port}", "send_queue_bytes": 0, "receive_queue_bytes": 1000}
    ]


# As torch counts; a group that only some workers are in does not say how far each of them is.
COUNTING = """
import sys, types
class Group:
    def __init__(self, size, count):
        self.size, self._get_sequence_number_for_group = lambda: size, lambda: count
c10d = types.ModuleType("torch.distributed.distributed_c10d")
c10d.is_initialized, c10d.get_world_size = lambda: True, lambda: 2
c10d._world = types.SimpleNamespace(pg_map=[Group(2, 41), Group(1, 7)])
sys.modules[c10d.__name__] = c10d
"""


def test_collectives_that_a_worker_has_launched_are_told(node: LocalNode) -> None:
    with running(node, COUNTING + SLEEPER):
        kept = node.run_dir(RUN) / "stacks/rank-0.sequence"
        wait_until(lambda: kept.is_file() and len(kept.read_bytes()) > 0)
        rank, launcher = (of_rank(diagnose(node), number) for number in (0, None))
        assert (rank["collectives"], launcher["collectives"], rank["gpu"]) == (41, None, False)
        # Of another process, which had this rank before.
        kept.write_text("1 99\n")
        assert of_rank(diagnose(node), 0)["collectives"] is None


@pytest.mark.parametrize("answer", [b"OK\nJob summary\n" + b"x" * 100_000, b""])
def test_nccl_ras_is_asked_on_its_port_and_waited_for_in_vain_for_a_moment_only(node: LocalNode, answer: bytes) -> None:
    asked: list[bytes] = []

    def serve() -> None:
        with server.accept()[0] as connection:
            asked.append(connection.recv(100))
            # The agent hangs up when it has heard enough, or nothing for long enough.
            with contextlib.suppress(ConnectionError):
                connection.sendall(answer)
                connection.recv(100)

    # NCCL takes the first address of localhost, whichever that is.
    family, *_, address = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        worker = SLEEPER.replace("import time", "import os, time")
        env = {"NCCL_RAS_ADDR": f"localhost:{server.getsockname()[1]}"}
        node.env.update(env)
        with running(node, worker):
            record = diagnose(node)
        thread.join()
    assert asked == [b"timeout 2\nverbose status\n"]
    if answer:
        assert record["ras"].startswith("Job summary\n")
        assert len(record["ras"]) == (1 << 16) - len("OK\n")
    else:
        assert record["ras"] == {"is": "unknown", "reason": "NCCL RAS gave no answer"}


@pytest.mark.parametrize(
    ("addr", "port"),
    [("localhost:20123", 20123), ("[::1]:20123", 20123), (None, 28028), ("x", 28028), ("a:99999", 28028)],
)
def test_nccl_ras_is_looked_for_where_localhost_leads(addr: str | None, port: int) -> None:
    # NCCL binds the first address of localhost, often ::1: an address in numbers would miss it.
    assert ras_target(addr) == ("localhost", port)


def test_what_nccl_warned_of_is_told(node: LocalNode) -> None:
    with running(node, SLEEPER):
        log = node.run_dir(RUN) / "nccl.gpu-a.7.log"
        log.write_text("a:7:9 [0] NCCL INFO fine\n" + "".join(f"a:7:9 [0] x.cc:1 NCCL WARN {n}\n" for n in range(30)))
        record = diagnose(node)
    assert record["nccl_warnings"] == [f"a:7:9 [0] x.cc:1 NCCL WARN {n}" for n in range(10, 30)]


def test_dumps_of_the_flight_recorder_are_listed(node: LocalNode) -> None:
    node.env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(node.home / "dump_")
    (node.home / "dump_0").write_bytes(b"12345")
    with running(node, SLEEPER):
        (node.run_dir(RUN) / "nccl_trace_rank_0").write_bytes(b"123")
        record = diagnose(node)
    assert record["flight_records"] == [
        {"path": str(node.run_dir(RUN) / "nccl_trace_rank_0"), "size_bytes": 3},
        {"path": str(node.home / "dump_0"), "size_bytes": 5},
    ]


def test_a_run_that_is_not_there_is_an_error(node: LocalNode) -> None:
    assert node.error("diagnose", {"run_id": "none.0"}) == "no run none.0 on this node"

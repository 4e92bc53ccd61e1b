from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.check.probe import probe
from multinode.cluster.cluster import Cluster, Node, local_cluster
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.launch.session import Chunk, Ended, FollowedRecord
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.unknown import reason_of
from multinode.transport.agent import AgentStream, AgentTransport, load_archive
from multinode.transport.local import LocalTransport
from tests.golden import Golden, error_of
from tests.node.localnode import LocalNode, wait_until

DEADLINE_S = 20.0
RUN_ID = "20260101-000000-abcd"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


@pytest.fixture
def local(home: Path) -> LocalTransport:
    return LocalTransport(home)


@pytest.fixture
def agent(local: LocalTransport) -> Iterator[AgentTransport]:
    transport = AgentTransport(local)
    yield transport
    transport.close()


@pytest.fixture
def cluster() -> Cluster:
    return local_cluster(2, sys.executable)


@pytest.fixture
def node(cluster: Cluster) -> Node:
    return cluster.nodes[0]


def wait_until_gone(pid: int) -> None:
    """A zombie is not gone."""
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_it_begins_in_the_home_directory_and_in_a_session_of_its_own(
    local: LocalTransport, node: Node, home: Path
) -> None:
    told = local.run(node, "pwd; echo ~; ps -o sid= -p $$; echo $$", deadline_s=DEADLINE_S).stdout.decode().split()
    assert told[:2] == [str(home)] * 2
    assert told[2] == told[3]


def test_the_session_that_the_controller_came_by_is_not_the_nodes(
    local: LocalTransport, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 5000 192.0.2.2 22")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    done = local.run(node, 'echo "$SSH_CONNECTION,$CUDA_VISIBLE_DEVICES"', deadline_s=DEADLINE_S)
    assert done.stdout == b",3\n"


def test_much_goes_both_ways_at_once(local: LocalTransport, node: Node) -> None:
    data = os.urandom(8 << 20)
    assert local.run(node, "cat", stdin=data, deadline_s=DEADLINE_S).stdout == data


def test_a_command_is_over_when_it_ends_and_not_at_the_next_look(local: LocalTransport, node: Node) -> None:
    began = time.monotonic()
    for _ in range(20):
        assert local.run(node, "true", deadline_s=DEADLINE_S).exit_code == 0
    # Twenty shells take a fifth of a second; twenty looks of a second each would be too much.
    assert time.monotonic() - began < 15


def test_a_flood_on_stderr_after_the_end_of_the_output_is_taken_too(local: LocalTransport, node: Node) -> None:
    late = local.run(node, "exec >&-; head -c 8000000 /dev/zero >&2", deadline_s=DEADLINE_S)
    assert (late.exit_code, len(late.stderr)) == (0, 1 << 16)


def test_a_command_that_gives_no_whole_answer_says_why_and_keeps_no_deadline_waiting(
    local: LocalTransport, node: Node, tmp_path: Path, golden: Golden
) -> None:
    began = time.monotonic()
    away = LocalTransport(tmp_path / "gone")
    errors = {
        "an answer without end": error_of(local.run, node, "exec cat /dev/zero", deadline_s=DEADLINE_S),
        "a command that is killed": error_of(local.run, node, "kill -9 $$", deadline_s=DEADLINE_S),
        "one that does not read": error_of(local.run, node, "exec sleep 60", stdin=bytes(1 << 20), deadline_s=0.2),
        "no home directory": error_of(away.run, node, "true", deadline_s=DEADLINE_S),
    }
    golden.check_errors("local", errors, tmp_path)
    assert time.monotonic() - began < 30


def test_letting_go_stops_nothing_and_leaves_no_zombie(local: LocalTransport, node: Node, home: Path) -> None:
    stream = local.open(node, "echo $$; cat; touch went-on", deadline_s=DEADLINE_S)
    pid = int(stream.read_line(DEADLINE_S) or 0)
    stream.close()
    wait_until_gone(pid)
    assert (home / "went-on").exists()


def test_a_reader_learns_at_once_that_its_stream_was_closed(local: LocalTransport, node: Node, golden: Golden) -> None:
    stream = local.open(node, "exec cat", deadline_s=DEADLINE_S)
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    golden.check_errors("local_closed", {"while it is read": error_of(stream.read_line, DEADLINE_S)})
    closer.join()


def test_a_job_of_this_machine_is_laid_out_over_its_loopback(agent: AgentTransport, cluster: Cluster) -> None:
    facts = probe(agent, cluster, controller_cwd=str(Path.cwd()), ports=(29500,), packages=False).require()
    assert reason_of(facts["localhost"].ssh_address)
    test = CollectiveTest(messages=(Message(collective="all_reduce", size_bytes=1024),))
    plan = plan_launch(cluster, test, facts, RUN_ID, LaunchOptions(agent=load_archive().path))
    assert (plan.rendezvous.addr, plan.world_size) == ("127.0.0.1", 2)
    assert [(one.place.endpoint.addr, one.place.endpoint.ifname) for one in plan.nodes] == [("127.0.0.1", "lo")]
    assert plan.nodes[0].command.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert plan.nodes[0].command.argv[0] == sys.executable


def test_a_run_is_supervised_let_go_followed_and_stopped(agent: AgentTransport, node: Node, home: Path) -> None:
    argv = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    asked = LocalNode.request(argv, RUN_ID, schema=1)
    stream = open_followed(agent, node, "supervise", asked)
    read_log_until(stream, b"begun\n")
    stream.close()
    supervisor = int(json.loads((home / ".multinode/runs" / RUN_ID / "supervisor.json").read_text())["pid"])
    followed = open_followed(agent, node, "follow", {"schema": 1, "run_id": RUN_ID, "offsets": {}})
    read_log_until(followed, b"begun\n")
    followed.send({"op": "stop", "grace_s": 1.0})
    last = [record for record in followed.records(time.monotonic() + DEADLINE_S) if isinstance(record, Ended)]
    followed.close()
    assert [(one.cause, one.processes_left) for one in last] == [("stopped", 0)]
    wait_until_gone(supervisor)
    assert [path.name for path in home.iterdir()] == [".multinode"]


def open_followed(agent: AgentTransport, node: Node, verb: str, request: dict[str, Any]) -> AgentStream[FollowedRecord]:
    return agent.open(node, verb, request, FollowedRecord, deadline_s=DEADLINE_S)  # type: ignore[arg-type]  # a union is no type


def read_log_until(stream: AgentStream[FollowedRecord], text: bytes) -> None:
    log = b""
    while text not in log:
        record = stream.read(DEADLINE_S)
        assert record is not None, f"it ended before {text!r}"
        if isinstance(record, Chunk) and record.file == "log":
            log += record.data

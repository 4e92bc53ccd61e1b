"""launch with restarts, on a node that says what a test tells it to: what ends the wait between two attempts."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import ConnectError
from multinode.job.code_tree import CodeFile, CodeTree
from multinode.job.job import ScriptJob
from multinode.launch.attach import find_recorded, stop
from multinode.launch.context import ExecuteOptions, Launch, Launched, RunContext
from multinode.launch.restart import RestartOptions
from multinode.launch.restarts import launch_with_restarts
from multinode.node.copies import wire
from multinode.node.copies.wire import Pipe, Wire
from multinode.node.manifest import pack_flags
from multinode.records.plan import CODE_FILE, CodeCopy, LaunchPlan
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests.launch.scripted import DEADLINE_S, HELLO, RUNNING, ScriptedNodes, Talk
from tests.launch.test_launch import FACTS

HOSTS = "a addr=10.0.0.1 slots=1\n"
CLUSTER: Cluster = parse_hostfile(HOSTS, "hosts")
STEP = base64.b64encode(b'{"kind":"step","rank":0,"step":3,"time_s":1,"mono_ns":1}\n').decode()
FAILS: list[dict[str, Any]] = [
    HELLO,
    RUNNING,
    {"kind": "chunk", "file": "samples/rank-0.jsonl", "offset": 0, "data": STEP},
    {"kind": "end", "state": "ended", "exit_code": 1, "cause": "exited", "ended_s": 1.0},
]
ENDS = {**FAILS[-1], "exit_code": 0}


CODE = CodeTree(
    source="/src", files=(CodeFile(path="train.py", digest=hashlib.sha256(b"x").hexdigest(), size_bytes=1),)
)


def _data(kind: int, content: bytes = b"") -> dict[str, str]:
    """A frame of a copy, as a line of a node."""
    said: list[bytes] = []
    Wire(Pipe(lambda piece: said.append(bytes(piece)), bytes)).send(kind, content)
    return {"kind": "data", "data": base64.b64encode(b"".join(said)).decode()}


def launch(execute: ExecuteOptions, code: CodeTree | None = None) -> Launch:
    return Launch(
        cluster=CLUSTER,
        hostfile=HOSTS,
        job=ScriptJob(argv=("train.py",)),
        code=code,
        execute=execute,
        check=False,
        run_id="r",
    )


class Restarted:
    """A run whose first attempt fails after its third step, and its launcher in a thread."""

    def __init__(self, runs: Path, stuck_at: str, node_wait_s: float = 600.0, code: CodeTree | None = None) -> None:
        self.runs = runs
        self.began = 0  # how many attempts did
        # a verb to which the node does not answer between two attempts; `stop` is out of reach instead
        self.stuck_at: str | None = stuck_at
        self.said: list[str] = []
        self._stuck, self._over = threading.Event(), threading.Event()
        self.context = RunContext(FakeTransport(self._answer), runs, say=self.said.append)
        self._pool = ThreadPoolExecutor(1)
        self.launched: Future[Launched] = self._pool.submit(
            launch_with_restarts,
            launch(ExecuteOptions(grace_s=0.1), code),
            self.context,
            RestartOptions(restarts=3, node_wait_s=node_wait_s),
        )

    def wait_stuck(self) -> None:
        assert self._stuck.wait(DEADLINE_S)

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()

    def record(self) -> Run | None:
        return RunDirectory(self.runs / "r").read("run.json", Run)

    def _answer(self, node: Node, command: str, _: bytes) -> list[bytes]:
        verb = command.rsplit(maxsplit=1)[-1]
        if self.began and verb == self.stuck_at:
            self._stuck.set()
            if verb == "stop":
                raise ConnectError("no SSH connection: no route to it", node=node.name)
            self._over.wait(DEADLINE_S)
        self.began += verb == "supervise"
        records = {
            "probe": [FACTS],
            "supervise": FAILS if self.began == 1 else [HELLO, RUNNING, ENDS],
            "stop": [{"kind": "stopped", "state": "ended", "processes_left": 0}],
            # One block, which the node has from the second attempt on.
            "code": [_data(wire.HAVE, pack_flags(bytes([bool(self.began)]))), _data(wire.COPIED)],
        }[verb]
        return [json.dumps(record).encode() + b"\n" for record in records]


@pytest.fixture(params=["stop", "probe"], ids=["waits-for-a-node", "probes"])
def restarted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restarted]:
    run = Restarted(tmp_path, request.param)
    try:
        run.wait_stuck()
        yield run
    finally:
        run.context.stop.ask("the test is over")
        run.close()


@pytest.mark.parametrize("name", ["r", "r-1"])
def test_a_stop_from_elsewhere_ends_a_run_that_is_between_two_attempts(restarted: Restarted, name: str) -> None:
    elsewhere = RunContext(FakeTransport(lambda *_: []), restarted.runs)
    stopped = stop(find_recorded(restarted.runs, name), elsewhere, 1.0)
    assert (stopped.run.run_id, stopped.run.status, stopped.run.stop_reason) == ("r", "stopped", "stop")
    ended = restarted.launched.result(DEADLINE_S).run
    assert (ended.status, restarted.began) == ("stopped", 1)
    assert restarted.record() == ended
    (attempt,) = ended.attempts
    assert (attempt.status, attempt.not_restarted) == ("failed", "it was told to stop")
    said = list(restarted.said)
    restarted.close()
    # What was waited for is of no interest any more.
    assert restarted.said == said
    assert not list(restarted.runs.glob("r-2/run.json"))


def test_ctrl_c_does_so_as_well(restarted: Restarted) -> None:
    restarted.context.stop.ask("SIGINT")
    ended = restarted.launched.result(DEADLINE_S).run
    assert (ended.status, ended.stop_reason, restarted.began) == ("stopped", "SIGINT", 1)


def test_a_node_that_returns_goes_on(tmp_path: Path) -> None:
    run = Restarted(tmp_path, "stop")
    run.wait_stuck()
    run.stuck_at = None
    ended = run.launched.result(DEADLINE_S).run
    run.close()
    assert (ended.status, [one.status for one in ended.attempts]) == ("succeeded", ["failed", "succeeded"])
    assert ended.attempts[0].lost_s is not None


def test_a_node_that_stays_away_is_why_the_run_is_not_restarted(tmp_path: Path) -> None:
    run = Restarted(tmp_path, "stop", node_wait_s=0.0)
    ended = run.launched.result(DEADLINE_S).run
    run.close()
    (attempt,) = ended.attempts
    assert (ended.status, run.began) == ("failed", 1)
    said = "a: it did not return within 0.0 s: no SSH connection: no route to it (wait longer with --node-wait"
    assert attempt.not_restarted is not None
    assert attempt.not_restarted.startswith(said)


@pytest.mark.parametrize("status", ["stopped", "lost"])
def test_a_stop_while_an_attempt_runs_is_its_last_however_it_ends(tmp_path: Path, status: str) -> None:
    grace_s = 0.2
    running = threading.Event()

    def play(talk: Talk) -> None:
        talk.received.get(timeout=DEADLINE_S)
        talk.say(FACTS)
        assert talk.received.get(timeout=DEADLINE_S)["verb"] == "supervise"
        talk.say(*FAILS[:-1])
        running.set()
        # As the other process has it, not as the run was launched.
        assert talk.order("stop")["grace_s"] == grace_s
        if status == "stopped":
            talk.end(exit_code=None, signal="SIGTERM", cause="stopped")
        else:
            talk.say({"kind": "error", "message": "the kernel is gone"})

    nodes = ScriptedNodes(play)
    context = RunContext(AgentTransport(nodes, AgentArchive(b"")), tmp_path)
    execute = ExecuteOptions(grace_s=60.0, verify_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(launch_with_restarts, launch(execute), context, RestartOptions(restarts=3))
        assert running.wait(DEADLINE_S)
        stopped = stop(find_recorded(tmp_path, "r"), RunContext(FakeTransport(lambda *_: []), tmp_path), grace_s)
        ended = launched.result(DEADLINE_S).run
    nodes.check()
    assert stopped.run == ended
    assert (ended.status, [attempt.status for attempt in ended.attempts]) == (status, [status])


def test_every_attempt_runs_in_the_same_copy_of_the_code(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "train.py").write_text("x")
    runs = tmp_path / "runs"
    run = Restarted(runs, "stop", code=msgspec.structs.replace(CODE, source=str(source)))
    run.wait_stuck()
    (source / "train.py").unlink()
    run.stuck_at = None
    ended = run.launched.result(DEADLINE_S)
    run.close()
    assert [one.status for one in ended.run.attempts] == ["failed", "succeeded"]
    plans = [RunDirectory(runs / name).read("plan.json", LaunchPlan) for name in ("r-1", "r-2")]
    assert [plan and plan.nodes[0].command.cwd for plan in plans] == ["/home/me/.multinode/code/r/tree"] * 2
    sent = [RunDirectory(runs / name).read(CODE_FILE, CodeCopy) for name in ("r-1", "r-2", "r")]
    assert [copied and copied.sent["a"].files for copied in sent] == [1, 0, 0]
    document = ended.document()
    assert document.code is not None
    assert document.code.digest == CODE.digest

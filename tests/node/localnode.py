"""A node that is this machine: the real archive under a bare interpreter, with a home directory of its own."""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from multinode.records.samples import parse_samples

Record = dict[str, Any]

DEADLINE_S = 20.0
PYTHON = [sys.executable, "-I", "-S"]
SLEEPER = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


class Conversation:
    """A verb that is running: its records come out of `read`, orders go in by `send`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.records: list[Record] = []
        self._queue: queue.Queue[Record | None] = queue.Queue()
        self._ended = False
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for record in parse_records(self.process.stdout):
            self._queue.put(record)
        self._queue.put(None)

    def send(self, order: Record | bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order if isinstance(order, bytes) else json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> Record | None:
        if self._ended:
            return None
        record = self._queue.get(timeout=DEADLINE_S)
        if record is None:
            self._ended = True
        else:
            self.records.append(record)
        return record

    def take(self, kind: str) -> Record:
        """The next record, which is of that kind."""
        record = self.read() or {}
        assert record.get("kind") == kind
        return record

    def read_until(self, **wanted: str) -> Record:
        while (record := self.read()) is not None:
            if wanted.items() <= record.items():
                return record
        raise AssertionError(f"the verb ended first: {self.records[-3:]}")

    def read_log_until(self, text: bytes) -> None:
        """Read until the log, as it was sent, holds `text`."""
        while text not in self.data("log"):
            assert self.read() is not None, f"the verb ended before {text!r}"

    def read_all(self) -> list[Record]:
        while self.read() is not None:
            pass
        return self.records

    def data(self, name: str, start: int = 0) -> bytes:
        """A file as it was sent from `start` on; fails where chunks leave a gap or repeat."""
        data = bytearray()
        for record in self.records:
            if record["kind"] == "chunk" and record["file"] == name:
                assert record["offset"] == start + len(data)
                data += base64.b64decode(record["data"])
        return bytes(data)

    def stop(self) -> Record:
        """Order the run to stop; the verb's last record."""
        self.send({"op": "stop", "grace_s": 5})
        return self.read_all()[-1]

    def hang_up(self) -> int:
        """Close stdin, as a dropped connection does, and wait for the verb's end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.read_all()
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.read_all()
        self.process.wait(DEADLINE_S)


class LocalNode:
    """This machine as a node.

    Args:
        home: its home directory.
        archive: the agent's zipapp.
    """

    def __init__(self, home: Path, archive: Path) -> None:
        self.home = home
        self.env = {"HOME": str(home), "PATH": os.environ["PATH"]}
        self.command = [*PYTHON, str(archive)]

    def call(
        self, verb: str, request: Record, *, env: dict[str, str] | None = None, deadline_s: float = DEADLINE_S
    ) -> tuple[int, list[Record]]:
        """Exit code and records of a verb, with stdin at its end after the request."""
        ended = subprocess.run(
            [*self.command, verb],
            input=json.dumps({"schema": 1, **request}).encode() + b"\n",
            env={**self.env, **(env or {})},
            cwd=self.home,
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
        assert ended.stderr == b""
        return ended.returncode, list(parse_records(ended.stdout.splitlines()))

    @contextmanager
    def talk(self, verb: str, request: Record, **options: Any) -> Iterator[Conversation]:
        """A verb with stdin kept open; it is killed at the end if it still runs."""
        process = subprocess.Popen(
            [*self.command, verb],
            env=self.env,
            cwd=self.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        )
        with process:
            conversation = Conversation(process)
            try:
                conversation.send({"schema": 1, **request})
                yield conversation
            finally:
                conversation.kill()

    def run(self, argv: list[str], run_id: str = "r", **changes: Any) -> Conversation:
        """A run to its end; its last record is that of the end."""
        with self.supervise(argv, run_id, **changes) as talk:
            talk.read_all()
        return talk

    def supervise(self, argv: list[str], run_id: str = "r", **changes: Any) -> AbstractContextManager[Conversation]:
        """A run that is talked to from its start on."""
        return self.talk("supervise", self.request(argv, run_id, **changes))

    def follow(self, *, offsets: dict[str, int] | None = None, **options: Any) -> AbstractContextManager[Conversation]:
        """A run that is talked to once more."""
        return self.talk("follow", {"run_id": "r", "offsets": offsets or {}}, **options)

    def samples(self, name: str, argv: list[str], **changes: Any) -> list[Record]:
        """The samples in a file of a run, at its end; each is one that the controller understands."""
        lines = self.run(argv, **changes).data(f"samples/{name}").splitlines()
        assert len(list(parse_samples(lines))) == len(lines)
        return [json.loads(line) for line in lines]

    def start(self, source: str, *arguments: str, ready: bytes = b"ready", run_id: str = "r", **changes: Any) -> None:
        """A detached run of a Python program; its log says `ready` already, each word as often as it stands there."""
        request = self.request([*self.script(source), *arguments], run_id, detach=True, **changes)
        code, records = self.call("supervise", request)
        assert code == 0, records
        assert [record["kind"] for record in records] == ["hello"]
        log, words = self.run_dir(run_id) / "log", ready.split()
        wait_until(lambda: log.read_bytes().count(words[0]) >= len(words))

    def stop(self, grace_s: float = 5.0, run_id: str = "r") -> Record:
        """The answer of the verb `stop`."""
        code, (record,) = self.call("stop", {"run_id": run_id, "grace_s": grace_s})
        assert (code, record["kind"]) == (0, "stopped")
        return record

    def kill_watchers(self, run_id: str = "r") -> None:
        watcher = self.watcher(run_id)
        for pid in (watcher["sentinel_pid"], watcher["pid"]):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(watcher["pid"]))

    def error(self, verb: str, request: Record) -> str:
        """The message of a verb that must fail."""
        code, records = self.call(verb, request)
        assert code == 1
        assert [record["kind"] for record in records] == ["error"]
        return str(records[0]["message"])

    @staticmethod
    def request(argv: list[str], run_id: str = "r", ifnames: Sequence[str] = (), **changes: Any) -> Record:
        """A supervise request with the defaults of a small job.

        `changes` are of the request, of its command, or of what is recorded.
        """
        command: Record = {"argv": argv, "env": {}, "unset": [], "cwd": None, "path_first": None, "prelude": None}
        command |= {name: changes.pop(name) for name in [*changes] if name in command}
        observation: Record = {"profile": False, "trace": None, "sample_interval_s": 1.0}
        observation |= {name: changes.pop(name) for name in [*changes] if name in observation}
        return {
            "run_id": run_id,
            "place": {"endpoint": {"ifname": next(iter(ifnames), None), "ifnames": list(ifnames)}},
            "gpus": None,
            "command": command,
            "files": [],
            "lease_s": 60.0,
            "grace_s": 5.0,
            "observation": observation,
            "detach": False,
            "offsets": {},
            **changes,
        }

    def script(self, source: str) -> list[str]:
        """argv of a Python program that is kept in the home directory."""
        path = self.home / f"job{len(list(self.home.glob('job*.py')))}.py"
        path.write_text(source)
        return [*PYTHON, str(path)]

    def run_dir(self, run_id: str = "r") -> Path:
        return self.home / ".multinode" / "runs" / run_id

    def status(self, run_id: str = "r") -> Record:
        record: Record = json.loads((self.run_dir(run_id) / "status.json").read_text())
        return record

    def watcher(self, run_id: str = "r") -> Record:
        record: Record = json.loads((self.run_dir(run_id) / "supervisor.json").read_text())
        return record

    def wait_for_log(self, run_id: str, text: bytes) -> bytes:
        log = self.run_dir(run_id) / "log"
        wait_until(lambda: text in log.read_bytes())
        return log.read_bytes()

    def wait_for_end(self, run_id: str = "r") -> Record:
        wait_until(lambda: self.status(run_id)["state"] == "ended")
        return self.status(run_id)

    def processes(self) -> list[int]:
        """All living processes of this node: by home directory in the environment, or by a path on the command line."""
        needle = os.fsencode(str(self.home))
        return [
            pid for pid in living() if pid != os.getpid() and needle in _read(pid, "environ") + _read(pid, "cmdline")
        ]

    def expect_empty(self) -> None:
        """Fails, after putting an end to them, if processes of this node are left."""
        try:
            wait_until(lambda: not self.processes())
        except AssertionError:
            left = {pid: _read(pid, "cmdline") for pid in self.processes()}
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes are left: {left}") from None


def parse_records(lines: Iterable[bytes]) -> Iterator[Record]:
    """What the agent says, after it has greeted."""
    first = iter(lines)
    assert next(first).strip() == b""
    assert json.loads(next(first))["kind"] == "agent"
    yield from map(json.loads, first)


def living() -> list[int]:
    """Pids of all processes that are no zombies."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and is_alive(int(path.name))]


def is_alive(pid: int) -> bool:
    stat = _read(pid, "stat")
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition`; the deadline only guards against a hang."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

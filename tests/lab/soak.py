"""A soak: a detached training in the lab, while controllers, their disk, clocks and the network are troubled at random.

The run has to end by itself with complete records; a second one, stopped by `multinode stop`, has to leave nothing.
As root, in a lab of its own:

    scripts/isolate .venv/bin/python -m tests.lab.soak --minutes 30 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from multinode.lab.cluster import down_lab, ns_command
from multinode.lab.state import MANAGEMENT_IFNAME, Lab
from tests.equipment.faults import Clock, LinkDown, clear_faults, make_fault
from tests.equipment.faults.sshd import INSTALL_CLOCK, find_clock_library
from tests.lab.conftest import SHARED, stand_lab
from tests.lab.launching import MULTINODE, REPOSITORY, agents, processes_of, wait_for

_TRAIN = str(Path(__file__).with_name("soak_train.py"))
_STEPS_PER_S = 50
_DISK = "256m"
# The longest that a trouble lasts, in seconds.
_LONGEST_S = 20.0
# Two followers at home, of which one holds the run and the other watches it, and one on another machine.
_FOLLOWERS = (("attach",), ("logs", "-f"), ("attach", "--hosts", "lab"))
_START_S = 120.0
_END_S = 600.0


class Soak:
    """One soak of a lab of two nodes.

    Args:
        folder: for the controllers' records; a small disk is mounted in it.
        seed: what happens, and when, follows from it.
        log: takes one JSON line for each event.
    """

    def __init__(self, lab: Lab, folder: Path, seed: int, log: Path) -> None:
        self._lab = lab
        self._home, self._elsewhere = folder / "home", folder / "elsewhere"
        self._clock = folder / "clock.so"
        self._log = log
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._started_s = time.monotonic()
        self._followers: dict[int, subprocess.Popen[bytes]] = {}
        self._run_id = ""
        self.events = 0

    def run(self, minutes: float) -> dict[str, Any]:
        """Trouble one run for so long and see it end; then stop another one. Returns what was seen."""
        install = [sys.executable, "-c", INSTALL_CLOCK, find_clock_library(), str(self._clock)]
        subprocess.run(install, check=True)
        with self._mounted():
            steps = round(minutes * 60 * _STEPS_PER_S)
            self._run_id = self._launch(steps)
            self._note("launched", run=self._run_id, steps=steps)
            # Stopped processes and a busy machine make the training longer than its steps would.
            end = time.monotonic() + minutes * 60 * 0.9
            while time.monotonic() < end and self._is_running():
                self._keep_followers()
                self._trouble()
                time.sleep(self._random.uniform(0.5, 4.0))
            for process in self._followers.values():
                process.kill()
                process.wait()
            ended = self._multinode("attach", self._run_id, "--json", deadline_s=minutes * 120 + _END_S)
            document = json.loads(ended.stdout)
            assert document["status"] == "succeeded", ended
            seen = {"events": self.events, **self._compare(steps)}
            self._note("ended", **seen)
            self._stop_another()
            wait_for(lambda: not agents())
            self._note("nothing left")
            return seen

    def _launch(self, steps: int) -> str:
        job = ("--", _TRAIN, "--steps", str(steps), "--steps-per-s", str(_STEPS_PER_S))
        where = ("--hosts", "lab", "--workers-per-node", "1", "--no-check")
        left = self._multinode("launch", *where, "--detach", "--json", *job, deadline_s=_START_S)
        document = json.loads(left.stdout)
        assert document["status"] == "running", left
        run_id: str = document["run_id"]
        return run_id

    def _trouble(self) -> None:
        troubles: tuple[Callable[[], None], ...] = (
            self._kill_follower,
            self._fill_disk,
            self._step_clock,
            self._freeze_follower,
            self._freeze_agent,
            self._cut_link,
        )
        self._random.choice(troubles)()
        self.events += 1
        assert self._is_running() or self._has_ended(), f"the run is gone after event {self.events}: {self._log}"

    def _keep_followers(self) -> None:
        alive = [number for number, process in self._followers.items() if process.poll() is None]
        for number, words in enumerate(_FOLLOWERS):
            if number not in alive:
                elsewhere = "--hosts" in words
                root = self._elsewhere / str(self.events) if elsewhere else self._home
                self._followers[number] = self._start(words[0], self._run_id, *words[1:], root=root)

    def _start(self, *arguments: str, root: Path) -> subprocess.Popen[bytes]:
        env = os.environ | {"MULTINODE_RUNS": str(root)}
        if self._random.random() < 1 / 3:
            # The clock of this controller alone; how long a time is stays right.
            offset_s = self._random.choice([-7200, -5, 5, 7200])
            env |= {
                "LD_PRELOAD": str(self._clock),
                "FAKETIME": f"{offset_s:+d}",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "NO_FAKE_STAT": "1",
            }
        self._note("follow", arguments=arguments, offset=env.get("FAKETIME", ""))
        with (self._log.parent / "followers.log").open("ab") as said:
            return subprocess.Popen(
                [*MULTINODE, *arguments], cwd=REPOSITORY, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def _kill_follower(self) -> None:
        process = self._random.choice(list(self._followers.values()))
        self._note("kill follower", arguments=process.args)
        process.kill()
        process.wait()

    def _fill_disk(self) -> None:
        self._note("fill disk")
        filler = self._home / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self._pause()
        filler.unlink()

    def _step_clock(self) -> None:
        node = self._random.choice(self._lab.nodes).name
        offset_s = self._random.choice([-3600.0, -5.0, 5.0, 3600.0])
        self._note("step clock", node=node, offset_s=offset_s)
        # Of the sessions that begin from now on: followers are killed and started anew.
        make_fault(self._lab, Clock(node=node, offset_s=offset_s))
        self._kill_follower()
        self._keep_followers()
        self._pause()
        clear_faults(self._lab)

    def _freeze_follower(self) -> None:
        self._freeze(self._random.choice(list(self._followers.values())).pid, "freeze follower")

    def _freeze_agent(self) -> None:
        if found := agents():
            self._freeze(self._random.choice(found), "freeze agent")

    def _freeze(self, pid: int, event: str) -> None:
        # A handle of this very process: its number may be another's by the time it goes on.
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                self._note(event, pid=pid)
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                self._pause()
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            finally:
                os.close(handle)

    def _cut_link(self) -> None:
        node = self._random.choice(self._lab.nodes).name
        self._note("cut management link", node=node)
        make_fault(self._lab, LinkDown(node=node, ifname=MANAGEMENT_IFNAME))
        self._pause()
        clear_faults(self._lab)

    def _pause(self) -> None:
        time.sleep(self._random.uniform(0.5, _LONGEST_S))

    def _is_running(self) -> bool:
        return bool(processes_of(self._run_id, 0)) and bool(processes_of(self._run_id, 1))

    def _has_ended(self) -> bool:
        return all(self._status(rank).get("state") == "ended" for rank in range(len(self._lab.nodes)))

    def _status(self, rank: int) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self._on_node(rank, "status.json"))
        return status

    def _on_node(self, rank: int, name: str) -> bytes:
        path = f"/root/.multinode/runs/{self._run_id}.{rank}/{name}"
        argv = [*ns_command(self._lab.nodes[rank]), "cat", path]
        return subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout

    def _compare(self, steps: int) -> dict[str, Any]:
        """What came home, byte by byte with what the nodes have."""
        home = self._home / self._run_id
        log_bytes = sample_bytes = 0
        for rank in range(len(self._lab.nodes)):
            log = self._on_node(rank, "log")
            kept = (home / "logs" / f"node-{rank}.log").read_bytes()
            assert kept == log, f"the log of node {rank}: {len(kept)} bytes here, {len(log)} there"
            lines = [int(line.split()[3]) for line in log.splitlines() if line.startswith(b"rank ")]
            assert lines == list(range(5 * steps)), f"node {rank} wrote {len(lines)} lines"
            log_bytes += len(log)
            found = 0
            for path in (home / "samples" / f"node-{rank}").iterdir():
                if path.name == "controller.jsonl":
                    continue
                data = path.read_bytes()
                there = self._on_node(rank, f"samples/{path.name}")
                assert data == there, f"{path}: {len(data)} bytes here, {len(there)} there"
                found += data.count(b'"kind": "step"')
                sample_bytes += len(data)
            assert found == steps, f"node {rank}: records of {found} steps, not {steps}"
        return {"steps": steps, "log_bytes": log_bytes, "sample_bytes": sample_bytes}

    def _stop_another(self) -> None:
        run_id = self._launch(steps=10**9)
        self._note("launched another", run=run_id)
        time.sleep(5.0)
        stopped = self._multinode("stop", run_id, "--json", deadline_s=_START_S)
        assert json.loads(stopped.stdout)["status"] == "stopped", stopped
        assert not processes_of(run_id)
        assert self._multinode("clean", run_id, "--hosts", "lab", deadline_s=_START_S).returncode == 0

    def _multinode(self, *arguments: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"MULTINODE_RUNS": str(self._home)}
        return subprocess.run(
            [*MULTINODE, *arguments],
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def _note(self, event: str, **figures: object) -> None:
        line = {"at_s": round(time.monotonic() - self._started_s, 1), "event": event, **figures}
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        """The controller's records lie on a disk of their own, which can be filled."""
        for folder in (self._home, self._elsewhere):
            folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "soak", self._home], check=True)
        try:
            yield
        finally:
            clear_faults(self._lab)
            for process in self._followers.values():
                process.kill()
                process.wait()
            if self._run_id and processes_of(self._run_id):
                self._multinode("stop", self._run_id, "--grace-period", "0", deadline_s=_START_S)
            subprocess.run(["umount", self._home], check=True)


def main() -> None:
    """Soak, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=Path("soak.jsonl"))
    asked = parser.parse_args()
    asked.log.unlink(missing_ok=True)
    lab = stand_lab(SHARED)
    try:
        with tempfile.TemporaryDirectory() as folder:
            seen = Soak(lab, Path(folder), asked.seed, asked.log.absolute()).run(asked.minutes)
    finally:
        down_lab()
    sys.stdout.write(json.dumps({"seed": asked.seed, "minutes": asked.minutes, **seen}) + "\n")


if __name__ == "__main__":
    main()

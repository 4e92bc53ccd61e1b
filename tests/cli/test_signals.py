"""Ctrl-C and other signals, as real processes get them: acted on in every phase, and left ignored where they were."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from multinode.records.run import new_run
from multinode.records.samples import CpuSample
from tests import make
from tests.transport.silent_sshd import silent_sshd

DEADLINE_S = 60.0
# Follows a run as `launch` does, for as long as nobody stops it.
FOLLOW = """
import sys, time
from multinode.cli.running import stop_on_signals
from multinode.launch.context import StopRequest
stop = StopRequest()
with stop_on_signals(stop), stop.heard():
    print("ready", flush=True)
    while not sys.stdin.readline().startswith("end") or "stubborn" in sys.argv:
        time.sleep(0.01)
print(f"asked {stop.count} times: {stop.reason}", flush=True)
"""


@contextlib.contextmanager
def following(*arguments: str, ignored: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    ignore = f"trap '' {' '.join(str(int(number)) for number in ignored)}; " if ignored else ""
    command = ["sh", "-c", f'{ignore}exec "$@"', "sh", sys.executable, "-c", FOLLOW, *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_ignored_stays_ignored(number: int) -> None:
    """`nohup multinode launch`, and `multinode launch &` in a script."""
    with following(ignored=(number,)) as process:
        process.send_signal(number)
        assert process.communicate("end\n", timeout=DEADLINE_S)[0] == "asked 0 times: \n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_not_ignored_asks_for_a_stop(number: signal.Signals) -> None:
    with following() as process:
        process.send_signal(number)
        assert process.communicate("end\n", timeout=DEADLINE_S)[0] == f"asked 1 times: {number.name}\n"


def test_the_third_ends_it_at_once() -> None:
    with following("stubborn") as process:
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert process.returncode == 130


@pytest.mark.parametrize("step", ["banner", "exec"])
@pytest.mark.parametrize(
    "verb",
    [
        "check --hosts hosts",
        "launch --hosts hosts -- train.py",
        "contrast --hosts hosts -- train.py",
        "attach --hosts hosts 20260101-000000-cccc",
    ],
)
def test_one_ends_a_verb_that_waits_for_a_frozen_node(verb: str, step: str, tmp_path: Path) -> None:
    """By itself it would end with 3, of a timeout."""
    (tmp_path / "train.py").write_text("")
    with silent_sshd(step, tmp_path) as server:
        config = server.node().ssh_config
        (tmp_path / "hosts").write_text(f"box slots=2 ssh_config={config}\njump slots=2 ssh_config={config}\n")
        with subprocess.Popen(
            [sys.executable, "-m", "multinode", *verb.split()],
            cwd=tmp_path,
            env=os.environ | {"MULTINODE_RUNS": str(tmp_path / "runs")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert server.was_met.wait(DEADLINE_S)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said


@pytest.mark.parametrize("verb", ["--verbose report", "attach"])
def test_one_ends_the_reading_of_a_long_run(verb: str, tmp_path: Path) -> None:
    """Of two nodes, before the second one is read."""
    names = ("a", "b")
    plan = make.plan(*names)
    directory = make.store(tmp_path / "runs", plan=plan)
    directory.write_cluster(make.cluster(*names), "a\nb\n")
    line = msgspec.json.encode(CpuSample(time_s=1.0, mono_ns=1, busy_percent=50.0)) + b"\n"
    for rank in (0, 1):
        directory.append_samples(rank, "sampler.jsonl", line * (60_000_000 // len(line)))
    directory.write("run.json", msgspec.structs.replace(new_run(plan, 1.0), status="succeeded"))
    with subprocess.Popen(
        [sys.executable, "-m", "multinode", *verb.split(), "r"],
        cwd=tmp_path,
        env=os.environ | {"MULTINODE_RUNS": str(tmp_path / "runs")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while "of samples: 0%" not in said:
            more = process.stderr.readline()
            assert more, said
            said += more
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 130, said
    assert "of samples: 50%" not in said
    assert "Traceback" not in said

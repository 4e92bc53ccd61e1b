"""Counters of NICs and ports, read from a tree that looks as the kernel's does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .instrumented import Worker

PRELUDE = """
import json, os, shutil, sys
sys.path.insert(0, os.environ["AGENT"])
from multinode_agent import worker
import multinode_agent.worker.hooks
guard = worker.guard.Guard(worker.recorder.Recorder(os.environ["MULTINODE_SAMPLES"], 3))
classes = os.environ["CLASSES"]
def say(value): print(json.dumps(value))
"""


@pytest.fixture
def worker(tmp_path: Path, archive: Path) -> Worker:
    return Worker(tmp_path, archive)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for name in ("eth0", "eth1"):
        folder = tmp_path / "class" / "net" / name / "statistics"
        folder.mkdir(parents=True)
        for number, field in enumerate(("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")):
            (folder / field).write_text(f"{1000 + number}\n")
    for port, files in (("1", ("port_xmit_data", "port_rcv_data")), ("2", ())):
        folder = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / port / "counters"
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_text("25\n")
    return tmp_path / "class"


def run(worker: Worker, classes: Path, script: str) -> tuple[list[object], str]:
    done = worker.run(PRELUDE + script, LOCAL_RANK=None, AGENT=str(worker.archive), CLASSES=str(classes))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


ETH0 = {"tx_bytes": 1000, "rx_bytes": 1001, "tx_packets": 1002, "rx_packets": 1003}
PORT = {"tx_bytes": 100, "rx_bytes": 100}


def test_named_nics_and_all_ports_that_count_are_read(worker: Worker, classes: Path) -> None:
    said, stderr = run(worker, classes, "say(worker.nics.NicMeter(guard, ['eth0'], classes)(1))")
    assert said == [{"nics": {"eth0": ETH0, "mlx5_0/1": PORT}}]
    assert stderr == ""


def test_counters_are_read_anew_but_not_at_every_step(worker: Worker, classes: Path) -> None:
    said, _ = run(
        worker,
        classes,
        """
nics = worker.nics.NicMeter(guard, ["eth0"], classes, interval_s=0.0)
nics(1)
open(classes + "/net/eth0/statistics/tx_bytes", "w").write("12345678901234567890")
say(nics(2)["nics"]["eth0"]["tx_bytes"])
rarely = worker.nics.NicMeter(guard, ["eth0"], classes, interval_s=3600.0)
say([len(rarely(number)) for number in range(3)])
""",
    )
    assert said == [12345678901234567890, [1, 0, 0]]


def test_a_nic_that_vanishes_is_told_once_and_the_others_are_read_on(worker: Worker, classes: Path) -> None:
    # What a NIC that has gone answers to an open descriptor is an error; an empty file is read as one.
    said, stderr = run(
        worker,
        classes,
        """
nics = worker.nics.NicMeter(guard, ["eth0", "eth1", "eth9"], classes, interval_s=0.0)
open(classes + "/net/eth1/statistics/rx_bytes", "w").close()
for number in range(3): say(sorted(nics(number)["nics"]))
""",
    )
    assert said == [["eth0", "mlx5_0/1"]] * 3
    assert sorted(line.partition(" failed")[0] for line in stderr.splitlines()) == [
        "multinode: reading the counters of eth1",
        "multinode: reading the counters of eth9",
    ]


@pytest.mark.parametrize(
    ("environ", "looks"),
    [
        ({"MULTINODE_IFNAMES": "lo", "LOCAL_RANK": "0"}, True),
        ({"MULTINODE_IFNAMES": "lo", "LOCAL_RANK": "1"}, False),
        ({"MULTINODE_IFNAMES": "", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "0"}, False),
    ],
)
def test_only_the_first_worker_looks_and_only_where_nics_are_named(
    worker: Worker, classes: Path, environ: dict[str, str], *, looks: bool
) -> None:
    said, _ = run(worker, classes, f"say(worker.nics.meter(guard, {environ!r}) is not None)")
    assert said == [looks]

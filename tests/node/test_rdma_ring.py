"""Raw RDMA around a ring, with a stand-in for ib_write_bw that speaks as perftest does, and a tree for /sys."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from multinode.node.bench.rings import parse_report, used_ports
from multinode.node.facts.nics import Counters
from tests.node.test_collective_bench import DEFAULTS, Workers

PROGRAM = Path(__file__).parent / "ib_write_bw.py"
# A kernel of its own below /sys/class/infiniband, whose ports count more whenever they are read.
KERNEL = """
import builtins, io, os, time

REAL, TREE = "/sys/class/infiniband", os.environ["STAND_IN_TREE"]
real_open, real_listdir = builtins.open, os.listdir

def moved(path):
    return TREE + path[len(REAL):] if isinstance(path, str) and path.startswith(REAL) else path

def grow(path, *arguments, **options):
    path = moved(path)
    if isinstance(path, str) and path.startswith(TREE) and path.endswith("port_xmit_data"):
        with real_open(path) as file:
            return io.StringIO(str(int(file.read()) * time.monotonic_ns()))
    return real_open(path, *arguments, **options)

builtins.open = grow
os.listdir = lambda path=".": real_listdir(moved(path))
"""


def test_a_report_is_read_as_perftest_prints_it() -> None:
    """REPORT_FMT of 4.4 and of 26.07, and REPORT_FMT_EXT of a rate below 0.1."""
    head = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
    old = " 65536      5000             97.44              97.28  \t\t   0.185547\n"
    new = " 131072     187230           0.00               98.16  \t\t     0.093613\n"
    slow = " 65536      10           0.000000            0.052400            0.000100\n"
    assert parse_report(head + old) == (65536 * 5000, 97.28)
    assert parse_report("-----\n" + head + new + "-----\n") == (131072 * 187230, 98.16)
    assert parse_report(head + slow) == (655360, 0.0524)
    # In MiB/s, without a row, of nothing.
    assert parse_report((head + old).replace("Gb/sec", "MiB/sec")) is None
    assert parse_report(old) is None
    assert parse_report(head) is None
    assert parse_report(head + new.replace("98.16", "0.00")) is None


def test_ports_in_use_are_those_that_sent() -> None:
    before: Counters = {name: {"tx_bytes": 5} for name in ("eth0", "mlx5_0/1", "mlx5_1/1", "mlx5_2/1")}
    sizes = {"eth0": 1 << 30, "mlx5_0/1": 1 << 26, "mlx5_1/1": 1 << 25, "mlx5_2/1": 1 << 20}
    after: Counters = {name: {"tx_bytes": size} for name, size in sizes.items()}
    assert used_ports(before, after) == ["mlx5_0/1", "mlx5_1/1"]
    assert used_ports(after, after) == []


class Fabric:
    """A tree of ports, the program on PATH, and two workers that each believe to be the first of a node."""

    def __init__(self, archive: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        self.log = root / "commands"
        (root / "run").mkdir()
        self.workers = Workers(archive, root / "run")
        (root / "sitecustomize.py").write_text(KERNEL)
        monkeypatch.setenv("STAND_IN_TREE", str(root / "infiniband"))
        monkeypatch.setenv("STAND_IN_LOG", str(self.log))

    def port(self, device: str, *, sends: bool = True) -> None:
        port = self._root / "infiniband" / device / "ports/1"
        (port / "counters").mkdir(parents=True)
        for name, text in {
            "state": "4: ACTIVE",
            "link_layer": "Ethernet",
            "rate": "200 Gb/sec (4X HDR)",
            "gids/3": "",
            "counters/port_xmit_data": str(int(sends)),
            "counters/port_rcv_data": "0",
        }.items():
            (port / name).parent.mkdir(exist_ok=True)
            (port / name).write_text(text)
        for index in range(4):
            for folder, text in (
                ("gids", "0000:0000:0000:0000:0000:ffff:c0a8:640a"),
                ("gid_attrs/types", "RoCE v2" if index == 3 else "IB/RoCE v1"),
            ):
                (port / folder).mkdir(parents=True, exist_ok=True)
                (port / folder / str(index)).write_text(text)

    def install(self, rates: str) -> None:
        program = self._root / "bin" / "ib_write_bw"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\n{PROGRAM.read_text()}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self._monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        self._monkeypatch.setenv("STAND_IN_GBIT", rates)

    def run(self) -> list[list[dict[str, object]]]:
        """Of each worker, the records of raw RDMA."""
        messages = [{"collective": "all_reduce", "size_bytes": 1 << 20, "turns": 2}]
        done = self.workers.run(2, messages=messages, iters=4, first_of_nodes=True, python_path=self._root)
        assert done.returncode == 0, done.stderr
        streams = [self.workers.records("stream", rank) for rank in range(2)]
        assert all(one["results"] for each in streams for one in each if one.get("network") != "rdma")
        return [[one for one in each if one.get("network") == "rdma"] for each in streams]


@pytest.fixture
def fabric(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return Fabric(archive, tmp_path, monkeypatch)


@pytest.mark.torch
def test_every_node_writes_to_the_next_over_the_ports_that_the_collective_used(fabric: Fabric) -> None:
    for device in ("mlx5_0", "mlx5_1"):
        fabric.port(device)
    fabric.port("mlx5_2", sends=False)
    fabric.install("mlx5_0=92.57,mlx5_1=97.28,mlx5_2=1")
    for (record,) in fabric.run():
        results = record["results"]
        assert isinstance(results, list)
        assert [(one["rdma_port"], one["error"]) for one in results] == [("mlx5_0:1", None), ("mlx5_1:1", None)]
        rates = [one["size_bytes"] * 8 / one["time_s"] / 1e9 for one in results]
        assert rates == pytest.approx([92.57, 97.28])
    commands = [line.split() for line in fabric.log.read_text().splitlines()]
    assert len(commands) == 8
    clients = [words for words in commands if words[-1] == DEFAULTS["addr"]]
    assert len(clients) == 4
    assert all("--report_gbits" in words and words[words.index("-x") + 1] == "3" for words in commands)


@pytest.mark.torch
def test_the_gid_that_the_user_names_is_taken(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.port("mlx5_0")
    fabric.install("mlx5_0=100.5")
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "1")
    assert all(len(each) == 1 for each in fabric.run())
    assert all(" -x 1 " in line for line in fabric.log.read_text().splitlines())


@pytest.mark.torch
@pytest.mark.parametrize("missing", ["program", "traffic"])
def test_without_the_program_or_a_port_in_use_there_is_raw_tcp_alone(fabric: Fabric, missing: str) -> None:
    fabric.port("mlx5_0", sends=missing != "traffic")
    if missing != "program":
        fabric.install("mlx5_0=100")
    assert fabric.run() == [[], []]
    assert not fabric.log.exists()


@pytest.mark.torch
def test_a_program_that_fails_is_told_with_its_words_and_the_test_goes_on(fabric: Fabric) -> None:
    fabric.port("mlx5_0")
    fabric.install("mlx5_9=1")
    for (record,) in fabric.run():
        assert record["results"] == [
            {
                "rdma_port": "mlx5_0:1",
                "error": "ib_write_bw exited with code 1: Unable to find the Infiniband/RoCE device",
            }
        ]

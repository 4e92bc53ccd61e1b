from __future__ import annotations

import json
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from multinode.node.facts.cgroups import MemoryReader
from multinode.node.rundir import RunDir
from multinode.node.sample.sampler import KernelLog, NodeSampler, parse_snmp
from multinode.records.samples import (
    CgroupSample,
    CpuSample,
    ListeningSample,
    NicSample,
    NoteSample,
    TcpSample,
    parse_samples,
)
from tests.golden import Golden, raised

from .localnode import LocalNode
from .own_group import own_group

BUSY = """
import time
end = time.monotonic() + 2.6
while time.monotonic() < end:
    pass
"""
# A child of the job listens on the first port after a while; nobody listens on the second.
SERVING = """
import os, socket, sys, time
if os.fork() == 0:
    time.sleep(0.4)
    server = socket.create_server(("127.0.0.1", {port}))
time.sleep(2.5)
"""
# Sends over the loopback for a second.
TALKING = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
other, _ = server.accept()
end = time.monotonic() + 1.2
while time.monotonic() < end:
    client.sendall(bytes(1000))
    other.recv(1000)
    time.sleep(0.01)
"""

# The part of /proc/net/snmp that matters and what stands around it, of Linux 6.1.
SNMP = """\
Icmp: InMsgs InErrors
Icmp: 40 0
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs \
RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 812 410 9 31 12 880214 1201337 421 0 77 0
Udp: InDatagrams NoPorts
Udp: 12 0
"""
XID = "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def records(node: LocalNode, source: str, **changes: Any) -> list[dict[str, Any]]:
    """What the samplers recorded while a program ran; every line is one that the controller understands."""
    with node.supervise(node.script(source), **changes) as talk:
        assert talk.read_all()[-1]["exit_code"] == 0
    lines = talk.data("samples/node.jsonl").splitlines()
    kinds = (NicSample, CpuSample, TcpSample, CgroupSample, NoteSample, ListeningSample)
    samples = list(parse_samples(lines))
    assert len(samples) == len(lines)
    assert all(isinstance(sample, kinds) for sample in samples)
    return [json.loads(line) for line in lines]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in found if record["kind"] == kind]


@pytest.mark.timing
def test_the_cores_that_a_job_uses_are_its_own(node: LocalNode) -> None:
    processor = of_kind(records(node, BUSY, sample_interval_s=0.2), "cpu")
    told = [(record["mono_ns"], record["job_cores"]) for record in processor if record["job_cores"] is not None]
    assert 2 <= len(told) <= 4
    # One loop; on a busy machine it may get less than a core, and it never has more.
    assert all(cores <= 1.2 for _, cores in told)
    assert max(cores for _, cores in told) >= 0.2
    last = processor[-1]
    assert 0 < last["memory_available_gib"] <= last["memory_total_gib"]
    assert 0 <= last["iowait_percent"] <= 100
    assert 0 <= last["steal_percent"] <= 100


def test_memory_is_what_the_control_group_of_the_job_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunDir("r")
    samples = Path(run.samples)
    samples.mkdir(parents=True)
    limited = MemoryReader(own_group(tmp_path, limit=str(1 << 28), used=str(1 << 27)))
    NodeSampler(run, [], 1.0, (), limited).sample_last()
    lines = (samples / "node.jsonl").read_text().splitlines()
    (record,) = of_kind([json.loads(line) for line in lines], "cpu")
    assert (record["memory_total_gib"], record["memory_available_gib"]) == (0.25, 0.125)


@pytest.mark.timing
def test_nics_are_read_often_at_first_and_then_at_the_interval(node: LocalNode) -> None:
    found = records(node, BUSY, ifnames=["lo"], sample_interval_s=60.0)
    times = [record["mono_ns"] for record in of_kind(found, "nic")]
    assert times == sorted(times)
    early = [time for time in times if time - times[0] < 1.9e9]
    # Ten of them on a quiet machine; then nothing until the end.
    assert 4 <= len(early) <= 11
    assert times[-1] - times[-2] >= 0.5e9


@pytest.mark.timing
def test_what_goes_out_is_counted_by_nics_and_by_tcp(node: LocalNode) -> None:
    found = records(node, TALKING, ifnames=["lo"], sample_interval_s=0.1)
    nics, tcp = of_kind(found, "nic"), of_kind(found, "tcp")
    assert nics[-1]["tx_bytes"] - nics[0]["tx_bytes"] >= 10_000
    assert tcp[-1]["sent_segments"] > tcp[0]["sent_segments"]
    # Ten times per second are for the NICs alone.
    assert len(tcp) <= len(nics) / 2
    assert all(later["mono_ns"] > one["mono_ns"] for one, later in pairwise(nics))


def test_a_server_is_told_of_once_when_the_job_itself_listens(node: LocalNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as taken:
        port, other = free.getsockname()[1], taken.getsockname()[1]
        free.close()
        found = records(node, SERVING.format(port=port), serves=port)
        assert [record["port"] for record in of_kind(found, "listening")] == [port]
        assert of_kind(records(node, SERVING.format(port=port), run_id="r2", serves=other), "listening") == []


def test_control_groups_are_sampled_or_missed_in_one_note(node: LocalNode) -> None:
    found = records(node, "import time; time.sleep(1.3)", sample_interval_s=0.2)
    limits = of_kind(found, "cgroup")
    missed = [note["message"] for note in of_kind(found, "note") if note["lacks"] == "cgroup"]
    assert len(missed) == (0 if limits else 1)
    assert all(record["throttled_us"] >= 0 for record in limits)


@pytest.mark.timing
def test_at_an_interval_of_a_second_everything_is_read_each_second(node: LocalNode) -> None:
    found = records(node, "import time; time.sleep(5.1)", ifnames=["lo"], sample_interval_s=1.0)
    for kind in ("nic", "cpu", "tcp"):
        late = [one["mono_ns"] for one in of_kind(found, kind) if one["mono_ns"] > found[0]["mono_ns"] + 2.5e9]
        assert len(late) >= 3, kind


@pytest.mark.timing
@pytest.mark.parametrize("interval_s", [0.001, 0.0])
def test_no_interval_makes_the_sampler_busy(node: LocalNode, interval_s: float) -> None:
    found = records(node, "import time; time.sleep(0.5)", ifnames=["lo"], sample_interval_s=interval_s)
    assert 3 <= len(of_kind(found, "nic")) <= 12


def test_sent_and_resent_segments_are_found_by_their_names() -> None:
    assert parse_snmp(SNMP) == {"kind": "tcp", "sent_segments": 1201337, "retransmitted_segments": 421}


def test_a_kernel_that_says_nothing_of_tcp_is_an_error(golden: Golden) -> None:
    without = raised(ValueError, parse_snmp, "Udp: InDatagrams\nUdp: 12\n")
    golden.check_errors("snmp_without_tcp", {"only UDP": without})


def logged(message: str) -> bytes:
    """As /dev/kmsg has it: priority, number, time and flags; the message; then pairs."""
    return f"4,1234,5678901,-;{message}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:65:00\n".encode()


def test_lines_about_hardware_are_kept_and_others_are_not(tmp_path: Path) -> None:
    # A pipe of packets gives one record a read, as the device does.
    reading, writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    log = KernelLog(f"/proc/self/fd/{reading}")
    # A pipe cannot be moved to its end, which the device can.
    log._fd = os.dup(reading)  # noqa: SLF001 - likewise
    for message in ("usb 1-1: new high-speed device", XID, "EXT4-fs (sda1): Remounting filesystem read-only"):
        os.write(writing, logged(message))
    assert [one["message"] for one in log.read()] == [XID, "EXT4-fs (sda1): Remounting filesystem read-only"]
    assert log.read() == []
    for _ in range(110):
        os.write(writing, logged(XID + "x" * 1000))
        found = log.read()
        assert all(len(one["message"]) <= 300 for one in found)
    assert found == [], "a log without end is cut off"
    log.close()
    os.close(reading)
    os.close(writing)
    assert KernelLog(str(tmp_path / "none")).read() == []

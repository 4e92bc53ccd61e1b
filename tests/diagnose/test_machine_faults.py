from __future__ import annotations

import json

import pytest

from multinode.diagnose.evidence import FaultWatch, NodeEvidence
from multinode.diagnose.failure import blame_machine, first_failure
from multinode.records.run import Failure, NodeRun
from multinode.records.samples import ExceptionSample, parse_samples
from multinode.records.status import Status
from tests.golden import Golden

from .told import told_of

# As the NVIDIA driver, the block layer, ext4 and EDAC log them.
XID_79 = "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_48 = "NVRM: Xid (PCI:0000:17:00): 48, pid=2143, name=python, DBE (double bit error) ECC Error"
XID_31 = "NVRM: Xid (PCI:0000:65:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS"
XID_999 = "NVRM: Xid (0000:65:00): 999, something new"
IO_ERROR = "blk_update_request: I/O error, dev nvme0n1, sector 123456 op 0x0:(READ) flags 0x80700"
READ_ONLY = "EXT4-fs (sda1): Remounting filesystem read-only"
EDAC = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"
GLOO = ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.2]:1234")
IB = (
    "torch.distributed.DistBackendError",
    "NCCL error: unhandled system error: Got completion from peer 10.0.0.2 with status=12 opcode=0 len=0",
)
CUDA = ("RuntimeError", "CUDA error: unspecified launch failure")
MODULE = ("ModuleNotFoundError", "No module named 'bitsandbytes'")


def kernel(message: str, time_s: float = 95.0) -> bytes:
    return b'{"kind":"kernel","time_s":%f,"message":"%s"}' % (time_s, message.encode())


def count(time_s: float, name: str = "ens1f0", **counters: int) -> bytes:
    record = {"kind": "nic", "time_s": time_s, "mono_ns": 0, "ifname": name, "rx_bytes": 0, "tx_bytes": 0, **counters}
    return json.dumps(record, separators=(",", ":")).encode()


def counts(before: int, after: int, counter: str = "carrier_changes", name: str = "ens1f0") -> list[bytes]:
    return [count(90.0, name, **{counter: before}), count(95.0, name, **{counter: after})]


def gpu(time_s: float, ecc: str) -> bytes:
    return b'{"kind":"gpu","time_s":%f,"mono_ns":0,"index":3,"ecc_uncorrected":%s}' % (time_s, ecc.encode())


def node(rank: int, *lines: bytes, said: tuple[str, str] | None = None, offset_s: float = 0.0) -> NodeEvidence:
    """One that failed at 100 s on the controller's clock; `lines` are its samples, on its own."""
    watch = FaultWatch(f"node{rank}")
    watch.take(parse_samples(lines))
    raised = (
        [] if said is None else [ExceptionSample(rank=rank, time_s=100.0 + offset_s, type=said[0], message=said[1])]
    )
    how = {"cause": "stopped", "signal": "SIGTERM"} if said is None else {"cause": "exited", "exit_code": 1}
    status = Status(state="ended", ended_s=101.0 + offset_s, **how)
    run = NodeRun(name=f"node{rank}", node_rank=rank, state="ended", status=status)
    return NodeEvidence(run=run, exceptions=raised, clock_offset_s=offset_s, faults=watch.faults)


def blamed(nodes: list[NodeEvidence], failure: Failure | None = None) -> Failure:
    found = blame_machine(failure or first_failure(nodes), nodes)
    assert found is not None
    return found


FAULTS: dict[str, tuple[list[bytes], tuple[str, str]]] = {
    "a GPU off the bus": ([kernel(XID_79)], GLOO),
    "a double bit error": ([kernel(XID_48)], CUDA),
    "an Xid that we do not know": ([kernel(XID_999)], CUDA),
    "a GPU that counts an ECC error": ([gpu(90.0, "1"), gpu(95.0, "2")], CUDA),
    "an error of the memory": ([kernel(EDAC)], CUDA),
    "an error of a disk": ([kernel(IO_ERROR)], ("OSError", "[Errno 5] Input/output error")),
    "a file system that became read-only": ([kernel(READ_ONLY)], ("OSError", "[Errno 30] Read-only file system")),
    "a link that went": (counts(2, 3), GLOO),
    "receive errors": (counts(0, 5000, "rx_errors"), GLOO),
    "transmit errors": (counts(1, 201, "tx_errors"), GLOO),
    "received packets that were dropped": (counts(0, 10_000, "rx_dropped"), GLOO),
    "outgoing packets that were dropped": (counts(7, 90_007, "tx_dropped"), GLOO),
    "an RDMA link that went": (counts(1, 2, name="mlx5_0/1"), IB),
    "an RDMA link that recovered": (counts(0, 1, "link_recoveries", "mlx5_0/1"), IB),
    "symbol errors": (counts(5, 905, "symbol_errors", "mlx5_0/1"), IB),
}


def fault_of(case: str) -> Failure:
    """node0 raises; the fault is node1's, whose clock is a minute ahead."""
    lines, said = FAULTS[case]
    shifted = [line.replace(b'"time_s":9', b'"time_s":15') for line in lines]
    return blamed([node(0, said=said), node(1, *shifted, offset_s=60.0)])


def test_a_fault_before_the_failure_is_the_first_cause(golden: Golden) -> None:
    golden.check_findings("machine_faults", {case: told_of(fault_of(case)) for case in FAULTS})


@pytest.mark.parametrize("case", FAULTS)
def test_a_failure_is_a_consequence_of_the_fault_before_it(case: str) -> None:
    failure = fault_of(case)
    kind, message = FAULTS[case][1]
    assert failure.consequences == (f"node0: rank 0 raised {kind}: {message}",)
    assert failure.time_s == 95.0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param([kernel(XID_31)], CUDA, id="the program's own"),
        pytest.param([kernel(XID_79, 104.0)], CUDA, id="after the failure"),
        pytest.param([kernel(IO_ERROR)], GLOO, id="a disk breaks no connection"),
        pytest.param(counts(2, 3), MODULE, id="a link has to do with no module"),
        pytest.param(counts(0, 20, "rx_errors"), GLOO, id="a few errors"),
        pytest.param([count(95.0, carrier_changes=7)], GLOO, id="changes before the run"),
        pytest.param([count(90.0), count(95.0, tx_errors=5000)], GLOO, id="not counted before"),
        pytest.param(counts(0, 900, "rx_dropped"), GLOO, id="drops of a busy receiver"),
        pytest.param(counts(9, 0, "tx_errors"), GLOO, id="counters that were reset"),
        pytest.param([gpu(95.0, "4")], CUDA, id="ECC errors before the run"),
        pytest.param([gpu(90.0, "4"), gpu(95.0, "null")], CUDA, id="no ECC any more"),
        pytest.param([kernel("usb 1-1: new device")], CUDA, id="anything else"),
    ],
)
def test_what_does_not_explain_a_failure_leaves_it_as_it_was(lines: list[bytes], said: tuple[str, str]) -> None:
    nodes = [node(0, *lines, said=said), node(1)]
    failure = first_failure(nodes)
    assert failure is not None
    assert blame_machine(failure, nodes) == failure


def test_a_link_that_went_is_behind_a_hang_for_which_the_run_was_stopped() -> None:
    nodes = [node(0), node(1, count(40.0, carrier_changes=2), count(60.0, carrier_changes=3))]
    hang = Failure(node="node0", node_rank=0, rank=0, message="all ranks wait in all_reduce", kind="hang")
    failure = blamed(nodes, hang)
    assert (failure.node, failure.message) == ("node1", "ens1f0 lost its link")
    assert failure.consequences == ("node0: all ranks wait in all_reduce",)


def test_the_earliest_of_several_faults_is_named_and_none_without_a_failure() -> None:
    nodes = [node(0, kernel(XID_79, 99.0), said=CUDA), node(1, kernel(XID_48, 98.0))]
    assert blamed(nodes).node == "node1"
    assert blame_machine(None, nodes) is None


def test_what_a_node_logs_reaches_no_terminal_as_it_is() -> None:
    nodes = [node(0, kernel("EDAC MC0: UE \\u001b[31mred\\u0007"), said=CUDA)]
    failure = blamed(nodes)
    assert failure.kind == "hardware"
    assert failure.message.isprintable()


def test_a_node_that_never_stops_talking_fills_no_memory() -> None:
    assert len(node(0, *[kernel(XID_79)] * 5000).faults) <= 100

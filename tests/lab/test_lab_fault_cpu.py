from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from multinode.core.run.samples import CgroupSample, CpuSample, Sample, parse_samples
from multinode.errors import UsageError
from multinode.lab.cgroups import find_groups, find_top
from multinode.lab.cluster import down_lab, exec_in_node
from multinode.lab.faults import Cpu, NodeState, SshdState, clear_faults, make_fault
from multinode.lab.state import STATE_DIR, Lab
from multinode.lab.teardown import find_remains

from . import launching
from .faulting import Command

pytestmark = [pytest.mark.lab]

# Works for a second, and says how much of it it had a core.
BUSY = (
    "import time; a, b = time.monotonic(), time.process_time()\n"
    "while time.monotonic() - a < 1: pass\n"
    "print((time.process_time() - b) / (time.monotonic() - a))"
)
LIMITED = 0.3
# A period that was just begun and a busy machine blur both; with a whole core it gets far more than this.
MOST = 0.42


def share_of(shell: Command, node: str) -> float:
    return float(shell(node, f"{sys.executable} -c '{BUSY}'").stdout)


@pytest.mark.timing
def test_a_busy_loop_gets_its_share_until_cleared(made: Lab, shell: Command) -> None:
    before = share_of(shell, "node1")
    make_fault(made, Cpu(node="node1", share=LIMITED))
    assert share_of(shell, "node1") == pytest.approx(LIMITED, abs=MOST - LIMITED)
    # The other node has what it had, if others leave it that.
    assert share_of(shell, "node0") > before / 2
    clear_faults(made)
    assert share_of(shell, "node1") > before / 2
    assert find_groups() == []


def test_what_ran_already_is_held_and_so_is_lab_exec(made: Lab, shell: Command) -> None:
    pid = shell("node0", "sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!").stdout
    make_fault(made, Cpu(node="node0", share=LIMITED))
    (group,) = find_groups()
    usage, began = _usage_s(made), time.monotonic()
    time.sleep(1)
    used, elapsed = _usage_s(made) - usage, time.monotonic() - began
    shell("node0", f"kill {pid}")
    assert 0 < used < MOST * elapsed
    assert exec_in_node(made.nodes[0], ["grep", "-q", group.name, "/proc/self/cgroup"]) == 0
    assert exec_in_node(made.nodes[1], ["grep", "-q", group.name, "/proc/self/cgroup"]) == 1


def test_the_node_sees_its_limit_and_cannot_change_it(made: Lab, shell: Command) -> None:
    make_fault(made, Cpu(node="node0", share=LIMITED))
    (group,) = find_groups()
    top = find_top("cpu")
    assert top is not None
    place = f"/sys/fs/cgroup/{group.name}" if top.unified else f"/sys/fs/cgroup/cpu/{group.name}"
    file = "cpu.max" if top.unified else "cpu.cfs_quota_us"
    assert shell("node0", f"cat {place}/{file}").stdout.split()[0] == "30000"
    assert "Read-only" in shell("node0", f"echo 90000 > {place}/{file}").stderr


@pytest.mark.timing
def test_a_run_records_the_limit_of_its_job(made: Lab, tmp_path: Path) -> None:
    make_fault(made, Cpu(node="node1", share=LIMITED))
    command = launching.Command(tmp_path / "runs")
    busy = (sys.executable, "-c", BUSY.replace("< 1", "< 3"))
    done = command.run("launch", "--hosts", "lab", "--workers-per-node", "1", "--engine", "command", "--", *busy)
    assert done.returncode == 0, done.stderr
    free, held = (_samples(tmp_path, node_rank) for node_rank in range(2))
    assert {one.quota_cores for one in free if isinstance(one, CgroupSample)} == {None}
    limits = [one for one in held if isinstance(one, CgroupSample)]
    assert {one.quota_cores for one in limits} == {LIMITED}
    # On a busy machine others hold it back as well, and the limit less often.
    assert limits[-1].throttled_us > limits[0].throttled_us
    assert limits[-1].throttled_periods > limits[0].throttled_periods
    cores = [one.job_cores for one in held if isinstance(one, CpuSample) and one.job_cores is not None]
    assert 0 < max(cores) < 2 * MOST


def test_of_two_shares_the_newest_counts_and_a_daemon_that_comes_back_is_free(made: Lab, shell: Command) -> None:
    make_fault(made, Cpu(node="node0", share=0.5))
    make_fault(made, Cpu(node="node0", share=LIMITED))
    (group,) = find_groups()
    quota = next(file for name in ("cpu.max", "cpu.cfs_quota_us") if (file := group / name).exists())
    assert quota.read_text().split()[0] == "30000"
    make_fault(made, SshdState(node="node0", how="stop"))
    # Cleared newest first: the daemon is started while the limit is in force, in the node's group.
    assert len(clear_faults(made)) == 3
    assert find_groups() == []
    assert shell("node0", f"grep -c {group.name} /proc/self/cgroup").stdout == "0\n"


@pytest.mark.parametrize("lost", [None, "state"])
def test_down_leaves_no_group_even_without_its_records(made: Lab, lost: str | None) -> None:
    make_fault(made, Cpu(node="node0", share=LIMITED))
    make_fault(made, Cpu(node="node1", share=LIMITED))
    make_fault(made, NodeState(node="node1", how="kill"))
    assert len(find_groups()) == 2
    assert find_remains().cgroups == tuple(map(str, find_groups()))
    if lost:
        shutil.rmtree(STATE_DIR)
    assert down_lab().cgroups
    assert find_groups() == []
    assert not find_remains()


def test_a_killed_node_comes_back_without_its_limit(made: Lab, shell: Command) -> None:
    make_fault(made, Cpu(node="node1", share=LIMITED))
    make_fault(made, NodeState(node="node1", how="kill"))
    assert len(clear_faults(made)) == 2
    assert find_groups() == []
    assert shell("node1", "hostname").stdout == "node1\n"


def test_a_share_that_is_all_there_is_is_refused(made: Lab) -> None:
    with pytest.raises(UsageError, match="no limit"):
        make_fault(made, Cpu(node="node0", share=4096))
    with pytest.raises(UsageError, match="a node cannot do with"):
        Cpu(node="node0", share=0.0)
    assert find_groups() == []


def _samples(folder: Path, node_rank: int) -> list[Sample]:
    """What the sampler of one node recorded in the only run there is."""
    (path,) = folder.glob(f"runs/*/samples/node-{node_rank}/node.jsonl")
    return list(parse_samples(path.read_bytes().splitlines()))


def _usage_s(lab: Lab) -> float:
    """Processor seconds of node 0's children of process 1 and below, as /proc has them."""
    ticks = 0
    namespace = Path(f"/proc/{lab.nodes[0].init.pid}/ns/pid").stat().st_ino
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/pid").stat().st_ino == namespace:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return ticks / 100

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.state import Lab, poll
from tests.equipment.faults import (
    Clock,
    DiskFull,
    FileMissing,
    FileText,
    NodeState,
    Package,
    SshdState,
    Variable,
    clear_faults,
)

from .conftest import DEADLINE_S
from .faulting import Command, Make, quick_ssh
from .launching import call_here

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stop", "Connection refused"),
        ("freeze", "timed out during banner exchange"),
        ("new-host-key", "Host key verification failed"),
        ("refuse-key", "Permission denied (publickey)"),
        ("crowded", "kex_exchange_identification"),
    ],
)
def test_sshd_turns_clients_away_until_cleared(lab: Lab, fault: Make, how: Any, said: str) -> None:
    fault(SshdState(node="node1", how=how))
    for _ in range(2):
        refused = quick_ssh("node1")
        assert refused.returncode == 255
        assert said in refused.stderr
    assert quick_ssh("node0").stdout == "node0\n"
    clear_faults(lab)
    assert quick_ssh("node1").stdout == "node1\n"


def test_sshd_that_was_stopped_is_up_again_for_lab_status(lab: Lab, fault: Make) -> None:
    def states() -> list[str]:
        return [node["state"] for node in json.loads(call_here("lab", "status", "--json").stdout)["nodes"]]

    fault(SshdState(node="node1", how="stop"))
    assert states() == ["up", "down"]
    clear_faults(lab)
    assert states() == ["up", "up"]


def test_a_crowded_sshd_stays_crowded_when_it_reads_another_configuration(lab: Lab, fault: Make) -> None:
    fault(SshdState(node="node1", how="crowded"))
    fault(Variable(node="node1", name="RANK", value="3"))
    assert "kex_exchange_identification" in quick_ssh("node1").stderr
    clear_faults(lab)
    assert quick_ssh("node1").stdout == "node1\n"


def test_a_frozen_node_neither_answers_nor_computes(lab: Lab, ssh: Command, fault: Make) -> None:
    counter = "/dev/shm/multinode-test-count"
    pid = ssh("node0", f"(while sleep 0.02; do echo x >> {counter}; done) >/dev/null 2>&1 & echo $!").stdout.strip()
    count = Path(f"/proc/{lab.nodes[0].init.pid}/root{counter}")
    try:
        assert any(count.exists() for _ in poll(DEADLINE_S))
        fault(NodeState(node="node0", how="freeze"))
        assert quick_ssh("node0").returncode == 255
        before = count.stat().st_size
        time.sleep(0.5)
        assert count.stat().st_size == before
        clear_faults(lab)
        assert quick_ssh("node0").stdout == "node0\n"
        assert int(ssh("node0", f"sleep 0.5; wc -c < {counter}").stdout) > before
    finally:
        clear_faults(lab)
        ssh("node0", f"kill {pid}; rm -f {counter}")


def test_a_full_disk_takes_nothing(lab: Lab, shell: Command, fault: Make) -> None:
    # Of what a node has of its own, on its disk and in none of its overlays, too.
    places = ("/tmp/multinode-test", "/root/.ssh/multinode-test")
    fault(DiskFull(node="node0"))
    for place in places:
        assert "No space left on device" in shell("node0", f"echo x > {place}").stderr
        assert shell("node1", f"echo x > {place} && rm {place}").returncode == 0
    assert shell("node0", "df --output=avail / | tail -1").stdout.strip() == "0"
    clear_faults(lab)
    for place in places:
        assert shell("node0", f"echo x > {place} && rm {place}").returncode == 0
    assert shell("node0", "df --output=size -B1 / | tail -1").stdout.strip() == str(lab.spec.disk_bytes)


def test_a_package_says_another_version_on_one_node(lab: Lab, shell: Command, fault: Make) -> None:
    ask = f"{lab.spec.python} -c 'import importlib.metadata as m; print(m.version(\"msgspec\"))'"
    true = shell("node1", ask).stdout
    fault(Package(node="node0", name="msgspec", version="0.1.2+lab"))
    assert shell("node0", ask).stdout == "0.1.2+lab\n"
    assert shell("node1", ask).stdout == true
    clear_faults(lab)
    assert shell("node0", ask).stdout == true


def test_a_file_and_a_directory_are_gone_for_one_node(lab: Lab, shell: Command, fault: Make, shared_dir: Path) -> None:
    data = shared_dir / "data"
    data.mkdir()
    (data / "train.json").write_text("[]\n")
    (shared_dir / "model").write_text("weights\n")
    fault(FileMissing(node="node0", path=str(shared_dir / "model")))
    fault(FileMissing(node="node0", path=str(data)))
    assert shell("node0", f"ls -A {shared_dir}").stdout == ""
    assert shell("node1", f"ls -A {shared_dir}").stdout == "data\nmodel\n"
    assert (data / "train.json").exists()
    clear_faults(lab)
    assert shell("node0", f"cat {data}/train.json {shared_dir}/model").stdout == "[]\nweights\n"


def test_a_file_has_another_text_for_one_node(lab: Lab, shell: Command, fault: Make, shared_dir: Path) -> None:
    given, new = shared_dir / "given", shared_dir / "new"
    given.write_text("as given\n")
    given.chmod(0o640)
    fault(FileText(node="node0", path=str(given), text="more\n", append=True))
    fault(FileText(node="node0", path=str(new), text="$HOME 'x'\n"))
    look = f"cd {shared_dir}; cat given new; stat -c %a given"
    assert shell("node0", look).stdout == "as given\nmore\n$HOME 'x'\n640\n"
    fault(FileText(node="node0", path=str(given), text="other\n"))
    assert shell("node0", look).stdout == "other\n$HOME 'x'\n640\n"
    assert shell("node1", f"ls {shared_dir}; cat {given}").stdout == "given\nas given\n"
    assert given.read_text() == "as given\n"
    clear_faults(lab)
    assert shell("node0", f"ls -A {shared_dir}; cat {given}").stdout == "given\nas given\n"


def test_a_variable_is_set_in_ssh_sessions_as_it_stands(lab: Lab, ssh: Command, fault: Make) -> None:
    value = "a b \"q\" 'q' \\n $HOME #c"
    fault(Variable(node="node0", name="NCCL_SOCKET_IFNAME", value="eth0"))
    fault(Variable(node="node0", name="ODD", value=value))
    assert ssh("node0", 'printf "%s|" "$NCCL_SOCKET_IFNAME" "$ODD"').stdout == f"eth0|{value}|"
    assert ssh("node1", "echo ${ODD-unset}").stdout == "unset\n"
    clear_faults(lab)
    assert ssh("node0", "echo ${ODD-unset} ${NCCL_SOCKET_IFNAME-unset}").stdout == "unset unset\n"


@pytest.mark.parametrize("offset_s", [90.0, -3600.0])
def test_a_clock_is_wrong_and_spans_are_right(lab: Lab, ssh: Command, fault: Make, offset_s: float) -> None:
    waits = "time.sleep(.1); threading.Event().wait(.1)"
    program = f"import threading, time; a=time.monotonic(); {waits}; print(time.time(), time.monotonic()-a)"
    ask = f"{lab.spec.python} -c '{program}'"
    fault(Clock(node="node0", offset_s=offset_s))
    wrong, span = map(float, ssh("node0", ask).stdout.split())
    assert wrong - time.time() == pytest.approx(offset_s, abs=10)
    assert 0.2 <= span < 5
    assert float(ssh("node1", ask).stdout.split()[0]) == pytest.approx(time.time(), abs=10)
    clear_faults(lab)
    assert float(ssh("node0", ask).stdout.split()[0]) == pytest.approx(time.time(), abs=10)

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from multinode.errors import NodeFailed, UsageError
from multinode.lab.access import SSH_CONFIG
from multinode.lab.cluster import LabSpec, down_lab, load_lab, up_lab
from multinode.lab.faults import (
    Address,
    Clock,
    DiskFull,
    Fault,
    FileMissing,
    FileText,
    Interface,
    LinkDown,
    LinkSlow,
    Mtu,
    NodeState,
    Package,
    Ports,
    Route,
    SshdState,
    Variable,
    clear_faults,
    list_faults,
    make_fault,
)
from multinode.lab.faults.records import add_record
from multinode.lab.processes import is_alive, poll
from multinode.lab.spec import Lab, LabNode
from multinode.lab.speed import measure_stream
from multinode.lab.state import STATE_DIR
from multinode.lab.teardown import find_remains

from .conftest import DEADLINE_S

pytestmark = pytest.mark.lab

Command = Callable[..., CompletedProcess[str]]

DROPPED = 124
REFUSED = 1
CONNECTED = 0

# Answers each connection with one byte after it has read as many as asked for.
_SERVER = """\
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    left = int(sys.argv[2])
    while left and (chunk := connection.recv(min(left, 65536))):
        left -= len(chunk)
    connection.send(b"." * (left == 0))
    connection.close()
"""
_CLIENT = """\
import socket, sys
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connection = socket.create_connection((address, port), timeout=3)
try:
    connection.sendall(bytes(size))
    print("arrived" if connection.recv(1) else "closed")
except TimeoutError:
    print("lost")
"""

EVERY_KIND: list[Fault] = [
    LinkDown(node="node0"),
    LinkSlow(node="node0", rate_gbit_per_s=0.1),
    Mtu(node="node0", mtu=9000),
    Ports(node="node0", first=1000, last=2000, action="drop"),
    Interface(node="node0", name="br-1234"),
    Address(node="node0", address="10.213.1.100/24"),
    Route(node="node0", peer="node1"),
    *[SshdState(node="node0", how=how) for how in ("stop", "freeze", "new-host-key", "refuse-key", "crowded")],
    Variable(node="node0", name="RANK", value="3"),
    Clock(node="node0", offset_s=90.0),
    NodeState(node="node0", how="kill"),
    NodeState(node="node0", how="freeze"),
    DiskFull(node="node0"),
    Package(node="node0", name="msgspec", version="0.1"),
    FileMissing(node="node0", path="/etc/hosts"),
    FileText(node="node0", path="/etc/hosts", text="x", append=True),
]


@pytest.fixture
def fault(lab: Lab) -> Iterator[Callable[[Fault], None]]:
    """Makes a fault; all are cleared at the end."""
    yield lambda one: make_fault(lab, one)
    clear_faults(lab)


def _on_network_of(node: LabNode) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{node.namespace}", sys.executable]


@contextmanager
def _server(node: LabNode, port: int, size_bytes: int = 0) -> Iterator[None]:
    argv = [*_on_network_of(node), "-c", _SERVER, str(port), str(size_bytes)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


def _connect(ssh: Command, source: str, address: str, port: int) -> int:
    return ssh(source, f"timeout 2 bash -c '</dev/tcp/{address}/{port}'").returncode


def _send(node: LabNode, address: str, port: int, size_bytes: int) -> str:
    argv = [*_on_network_of(node), "-c", _CLIENT, address, str(port), str(size_bytes)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout.strip()


def _ssh(node: str) -> CompletedProcess[str]:
    """A client that does not wait long."""
    options = ["-F", str(SSH_CONFIG), "-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
    return subprocess.run(
        ["ssh", *options, node, "hostname"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_link_that_is_down_carries_nothing_and_says_so(
    lab: Lab, ssh: Command, fault: Callable[[Fault], None]
) -> None:
    node0, _ = lab.nodes
    with _server(node0, 7001):
        assert _connect(ssh, "node1", node0.addr, 7001) == CONNECTED
        fault(LinkDown(node="node0"))
        assert _connect(ssh, "node1", node0.addr, 7001) != CONNECTED
        assert ssh("node0", "cat /sys/class/net/ens1f0/carrier").stdout == "0\n"
        assert _connect(ssh, "node1", node0.management_addr, 7001) == CONNECTED
        clear_faults(lab)
        assert _connect(ssh, "node1", node0.addr, 7001) == CONNECTED


def test_a_management_link_that_is_down_takes_ssh_away(lab: Lab, fault: Callable[[Fault], None]) -> None:
    fault(LinkDown(node="node1", ifname="eth0"))
    assert _ssh("node1").returncode == 255
    assert _ssh("node0").stdout == "node0\n"
    clear_faults(lab)
    assert _ssh("node1").stdout == "node1\n"


def test_a_slow_link_carries_less_than_its_card_says(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    node0, node1 = lab.nodes
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.05))
    for source, target in ((node0, node1), (node1, node0)):
        assert measure_stream(source, target).goodput_gbit_per_s < 0.06
    assert ssh("node1", "cat /sys/class/net/ens1f0/speed").stdout == "1000\n"
    clear_faults(lab)
    assert measure_stream(node0, node1).goodput_gbit_per_s > 0.2


def test_large_frames_vanish_where_both_cards_have_a_larger_mtu(lab: Lab, fault: Callable[[Fault], None]) -> None:
    node0, node1 = lab.nodes
    with _server(node1, 7002, 300_000), _server(node0, 7002, 300_000), _server(node1, 7003, 100):
        fault(Mtu(node="node0", mtu=9000))
        assert _send(node0, node1.addr, 7002, 300_000) == "arrived"
        fault(Mtu(node="node1", mtu=9000))
        assert _send(node0, node1.addr, 7002, 300_000) == "lost"
        assert _send(node1, node0.addr, 7002, 300_000) == "lost"
        assert _send(node0, node1.addr, 7003, 100) == "arrived"
    clear_faults(lab)
    with _server(node1, 7004, 300_000):
        assert _send(node0, node1.addr, 7004, 300_000) == "arrived"


@pytest.mark.parametrize(("action", "outcome"), [("drop", DROPPED), ("reject", REFUSED)])
def test_ports_are_closed_on_the_training_card_alone(
    lab: Lab, ssh: Command, fault: Callable[[Fault], None], action: str, outcome: int
) -> None:
    node0, node1 = lab.nodes
    with _server(node1, 7100), _server(node1, 7111), _server(node0, 7105):
        fault(Ports(node="node1", first=7100, last=7110, action=action))
        assert _connect(ssh, "node0", node1.addr, 7100) == outcome
        assert _connect(ssh, "node0", node1.addr, 7111) == CONNECTED
        assert _connect(ssh, "node0", node1.management_addr, 7100) == CONNECTED
        assert _connect(ssh, "node1", node0.addr, 7105) == CONNECTED
        clear_faults(lab)
        assert _connect(ssh, "node0", node1.addr, 7100) == CONNECTED


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
def test_sshd_turns_clients_away_until_cleared(lab: Lab, fault: Callable[[Fault], None], how: str, said: str) -> None:
    fault(SshdState(node="node1", how=how))
    for _ in range(2):
        refused = _ssh("node1")
        assert refused.returncode == 255
        assert said in refused.stderr
    assert _ssh("node0").stdout == "node0\n"
    clear_faults(lab)
    assert _ssh("node1").stdout == "node1\n"


def test_sshd_that_was_stopped_is_up_again_for_lab_status(
    lab: Lab, fault: Callable[[Fault], None], multinode: Command
) -> None:
    def states() -> list[str]:
        return [node["state"] for node in json.loads(multinode("lab", "status", "--json").stdout)["nodes"]]

    fault(SshdState(node="node1", how="stop"))
    assert states() == ["up", "down"]
    clear_faults(lab)
    assert states() == ["up", "up"]


def test_a_crowded_sshd_stays_crowded_when_it_reads_another_configuration(
    lab: Lab, fault: Callable[[Fault], None]
) -> None:
    fault(SshdState(node="node1", how="crowded"))
    fault(Variable(node="node1", name="RANK", value="3"))
    assert "kex_exchange_identification" in _ssh("node1").stderr
    clear_faults(lab)
    assert _ssh("node1").stdout == "node1\n"


def test_a_frozen_node_neither_answers_nor_computes(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    counter = "/dev/shm/multinode-test-count"
    pid = ssh("node0", f"(while sleep 0.02; do echo x >> {counter}; done) >/dev/null 2>&1 & echo $!").stdout.strip()
    count = Path(f"/proc/{lab.nodes[0].init.pid}/root{counter}")
    try:
        assert any(count.exists() for _ in poll(DEADLINE_S))
        fault(NodeState(node="node0", how="freeze"))
        assert _ssh("node0").returncode == 255
        before = count.stat().st_size
        time.sleep(0.5)
        assert count.stat().st_size == before
        clear_faults(lab)
        assert _ssh("node0").stdout == "node0\n"
        assert ssh("node0", f"sleep 0.5; wc -c < {counter}").stdout.strip() > str(before)
    finally:
        clear_faults(lab)
        ssh("node0", f"kill {pid}; rm -f {counter}")


def test_a_full_disk_takes_nothing(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    # Of what a node has of its own, on its disk and in none of its overlays, too.
    places = ("/tmp/multinode-test", "/root/.ssh/multinode-test")
    fault(DiskFull(node="node0"))
    for place in places:
        assert "No space left on device" in ssh("node0", f"echo x > {place}").stderr
        assert ssh("node1", f"echo x > {place} && rm {place}").returncode == 0
    assert ssh("node0", "df --output=avail / | tail -1").stdout.strip() == "0"
    clear_faults(lab)
    for place in places:
        assert ssh("node0", f"echo x > {place} && rm {place}").returncode == 0
    assert ssh("node0", "df --output=size -B1 / | tail -1").stdout.strip() == str(lab.spec.disk_bytes)


def test_a_package_says_another_version_on_one_node(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    ask = f"{lab.spec.python} -c 'import importlib.metadata as m; print(m.version(\"msgspec\"))'"
    true = ssh("node1", ask).stdout
    fault(Package(node="node0", name="msgspec", version="0.1.2+lab"))
    assert ssh("node0", ask).stdout == "0.1.2+lab\n"
    assert ssh("node1", ask).stdout == true
    clear_faults(lab)
    assert ssh("node0", ask).stdout == true


def test_a_file_and_a_directory_are_gone_for_one_node(
    lab: Lab, ssh: Command, fault: Callable[[Fault], None], shared_dir: Path
) -> None:
    data = shared_dir / "data"
    data.mkdir()
    (data / "train.json").write_text("[]\n")
    (shared_dir / "model").write_text("weights\n")
    fault(FileMissing(node="node0", path=str(shared_dir / "model")))
    fault(FileMissing(node="node0", path=str(data)))
    assert ssh("node0", f"ls -A {shared_dir}").stdout == ""
    assert ssh("node1", f"ls -A {shared_dir}").stdout == "data\nmodel\n"
    assert (data / "train.json").exists()
    clear_faults(lab)
    assert ssh("node0", f"cat {data}/train.json {shared_dir}/model").stdout == "[]\nweights\n"


def test_a_file_has_another_text_for_one_node(
    lab: Lab, ssh: Command, fault: Callable[[Fault], None], shared_dir: Path
) -> None:
    given, new = shared_dir / "given", shared_dir / "new"
    given.write_text("as given\n")
    given.chmod(0o640)
    fault(FileText(node="node0", path=str(given), text="more\n", append=True))
    fault(FileText(node="node0", path=str(new), text="$HOME 'x'\n"))
    look = f"cd {shared_dir}; cat given new; stat -c %a given"
    assert ssh("node0", look).stdout == "as given\nmore\n$HOME 'x'\n640\n"
    fault(FileText(node="node0", path=str(given), text="other\n"))
    assert ssh("node0", look).stdout == "other\n$HOME 'x'\n640\n"
    assert ssh("node1", f"ls {shared_dir}; cat {given}").stdout == "given\nas given\n"
    assert given.read_text() == "as given\n"
    clear_faults(lab)
    assert ssh("node0", f"ls -A {shared_dir}; cat {given}").stdout == "given\nas given\n"


def test_a_variable_is_set_in_ssh_sessions_as_it_stands(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    value = "a b \"q\" 'q' \\n $HOME #c"
    fault(Variable(node="node0", name="NCCL_SOCKET_IFNAME", value="eth0"))
    fault(Variable(node="node0", name="ODD", value=value))
    assert ssh("node0", 'printf "%s|" "$NCCL_SOCKET_IFNAME" "$ODD"').stdout == f"eth0|{value}|"
    assert ssh("node1", "echo ${ODD-unset}").stdout == "unset\n"
    clear_faults(lab)
    assert ssh("node0", "echo ${ODD-unset} ${NCCL_SOCKET_IFNAME-unset}").stdout == "unset unset\n"


@pytest.mark.parametrize("offset_s", [90.0, -3600.0])
def test_a_clock_is_wrong_and_spans_are_right(
    lab: Lab, ssh: Command, fault: Callable[[Fault], None], offset_s: float
) -> None:
    program = "import time; a=time.monotonic(); time.sleep(.1); print(time.time(), time.monotonic()-a)"
    ask = f"{lab.spec.python} -c '{program}'"
    fault(Clock(node="node0", offset_s=offset_s))
    wrong, span = map(float, ssh("node0", ask).stdout.split())
    assert wrong - time.time() == pytest.approx(offset_s, abs=10)
    assert 0.1 <= span < 5
    assert float(ssh("node1", ask).stdout.split()[0]) == pytest.approx(time.time(), abs=10)
    clear_faults(lab)
    assert float(ssh("node0", ask).stdout.split()[0]) == pytest.approx(time.time(), abs=10)


def test_a_second_card_in_the_training_subnet(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    node0, _ = lab.nodes
    fault(Address(node="node0", address="10.213.1.100/24"))
    assert ssh("node0", "ip -4 -o address show to 10.213.1.0/24 | wc -l").stdout.strip() == "2"
    with _server(node0, 7005):
        for address in (node0.addr, "10.213.1.100"):
            assert _connect(ssh, "node1", address, 7005) == CONNECTED
        clear_faults(lab)
        assert _connect(ssh, "node1", node0.addr, 7005) == CONNECTED
        assert _connect(ssh, "node1", "10.213.1.100", 7005) != CONNECTED
    assert ssh("node0", "test -e /sys/class/net/ens1f1").returncode == 1


def test_an_interface_more_is_up_and_running(lab: Lab, ssh: Command, fault: Callable[[Fault], None]) -> None:
    fault(Interface(node="node0", name="tailscale0", address="100.64.0.1/10"))
    told = ssh("node0", "cat /sys/class/net/tailscale0/operstate; ip -4 -brief address show tailscale0").stdout
    assert told.split()[0] == "up"
    assert "100.64.0.1/10" in told
    clear_faults(lab)
    assert "tailscale0" not in ssh("node0", "ls /sys/class/net").stdout


def test_a_route_sends_training_traffic_through_the_management_card(
    lab: Lab, ssh: Command, fault: Callable[[Fault], None]
) -> None:
    node0, node1 = lab.nodes

    def sent_bytes(ifname: str) -> int:
        return int(ssh("node0", f"cat /sys/class/net/{ifname}/statistics/tx_bytes").stdout)

    fault(Route(node="node0", peer="node1"))
    with _server(node1, 7006, 3_000_000):
        before = sent_bytes("eth0"), sent_bytes("ens1f0")
        assert _send(node0, node1.addr, 7006, 3_000_000) == "arrived"
        assert sent_bytes("eth0") - before[0] > 3_000_000
        assert sent_bytes("ens1f0") - before[1] < 1_000_000
        clear_faults(lab)
        before = sent_bytes("eth0"), sent_bytes("ens1f0")
        assert _send(node0, node1.addr, 7006, 3_000_000) == "arrived"
        assert sent_bytes("ens1f0") - before[1] > 3_000_000


def test_a_fault_that_cannot_be_made_leaves_nothing(lab: Lab, ssh: Command) -> None:
    with pytest.raises(NodeFailed, match="No such file or directory"):
        make_fault(lab, FileText(node="node0", path="/nowhere/file", text="x"))
    with pytest.raises(NodeFailed, match="it is a directory"):
        make_fault(lab, FileText(node="node0", path="/etc", text="x"))
    assert list_faults() == ()
    assert ssh("node0", "test -d /etc && test ! -e /nowhere && test ! -e /.multinode-faults").returncode == 0


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda one: one.describe())
def test_a_fault_on_record_that_was_never_made_is_cleared(lab: Lab, ssh: Command, kind: Fault) -> None:
    look = "cat /etc/hosts /etc/ssh/sshd_config; ip address; ip route; nft list ruleset; env; df --output=size /"
    before = ssh("node0", look).stdout
    add_record(kind, lab.nodes[0].boot_id)
    assert clear_faults(lab) == (kind,)
    assert list_faults() == ()
    assert _without_ports(ssh("node0", look).stdout) == _without_ports(before)


def _without_ports(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("SSH_C")]


def test_faults_are_cleared_a_node_at_a_time_and_newest_first(lab: Lab, fault: Callable[[Fault], None]) -> None:
    made = [Mtu(node=node, mtu=mtu) for node, mtu in (("node0", 9000), ("node1", 9000), ("node0", 4000))]
    for one in made:
        fault(one)
    assert list_faults() == tuple(made)
    assert clear_faults(lab, "node0") == (made[2], made[0])
    assert list_faults() == (made[1],)
    assert clear_faults(lab) == (made[1],)
    assert clear_faults(lab) == ()
    with pytest.raises(UsageError, match="no node 'node7'"):
        clear_faults(lab, "node7")


def test_the_record_is_for_root_alone(fault: Callable[[Fault], None]) -> None:
    fault(Variable(node="node0", name="TOKEN", value="secret"))
    assert (STATE_DIR / "faults.json").stat().st_mode & 0o777 == 0o600


def test_the_command_makes_lists_and_clears(lab: Lab, ssh: Command, multinode: Command) -> None:
    try:
        made = multinode("lab", "fault", "file", "all", "/etc/nccl.conf", "--text", "NCCL_DEBUG=INFO")
        assert made.returncode == 0, made.stderr
        assert made.stdout.count("/etc/nccl.conf is 'NCCL_DEBUG=INFO\\n'") == len(lab.nodes)
        assert ssh("node1", "cat /etc/nccl.conf").stdout == "NCCL_DEBUG=INFO\n"
        again = multinode("lab", "fault", "file", "node0", "/etc/nccl.conf", "--text", "NCCL_DEBUG=INFO")
        assert again.returncode == 2
        assert "is in force" in again.stderr
        assert multinode("lab", "fault").stdout == made.stdout
        listed = json.loads(multinode("lab", "fault", "list", "--json").stdout)
        assert listed["schema"] == "multinode.lab-fault/1"
        assert [(one["kind"], one["node"]) for one in listed["faults"]] == [
            ("file-text", "node0"),
            ("file-text", "node1"),
        ]
        cleared = json.loads(multinode("lab", "fault", "clear", "node1", "--json").stdout)
        assert [one["node"] for one in cleared["cleared"]] == ["node1"]
        assert [one["node"] for one in cleared["faults"]] == ["node0"]
    finally:
        assert multinode("lab", "fault", "clear").returncode == 0
    assert "no fault was in force" in multinode("lab", "fault", "clear").stderr
    assert ssh("node0", "test -e /etc/nccl.conf").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("ports node7 --drop 80", "the lab has no node 'node7'"),
        ("ports node0 --drop 80-20", "80-20 is not a range of ports"),
        ("ports node0 --drop http", "'http' is not a range of ports"),
        ("ports node0 --drop 80 --reject 80", "--drop and --reject was given"),
        ("link node0", "nothing was given"),
        ("link node0 --down --interface lo", "a node has no card 'lo'"),
        ("mtu node0 1500", "an MTU of 1500 is no fault here"),
        ("sshd node0 slow", "'slow' is none of the faults of this kind"),
        ("node node0 sleep", "'sleep' is none of the faults of this kind"),
        ("disk node0 half", "a disk cannot be 'half'"),
        ("package node0 torch", "'torch' has no name and value"),
        ("package node0 torch=new", "'new' is not a version"),
        ("package node0 no-such-package=1.0", "no-such-package is not installed for"),
        ("file node0 etc/hosts --missing", "'etc/hosts' is not a path from the root"),
        ("variable node0 1A=x", "'1A' is not the name of a variable"),
        ("clock node0 90", "'90' does not say how far a clock is off"),
        ("address node0 10.213.1.2/24", "10.213.1.2 is an address of node1"),
        ("address node0 10.213.1.300/24", "'10.213.1.300/24' is not an address"),
        ("interface node0 ens1f0", "node0 has an interface ens1f0 already"),
        ("route node0 node0", "node0 has no route to itself"),
        ("route node0 node7", "the lab has no node 'node7'"),
    ],
)
def test_what_cannot_be_asked_for_is_one_clear_line(lab: Lab, multinode: Command, arguments: str, said: str) -> None:
    del lab
    done = multinode("lab", "fault", *arguments.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list_faults() == ()


def test_a_killed_node_is_silent_and_comes_back_with_a_fresh_disk(no_lab: None, ssh: Command) -> None:
    del no_lab
    lab = up_lab(LabSpec(node_count=2, rate_gbit_per_s=None, python=sys.executable, disk_bytes=1 << 30))
    boot_id = ssh("node1", "echo x > /tmp/old; cat /proc/sys/kernel/random/boot_id").stdout
    make_fault(lab, Variable(node="node1", name="RANK", value="3"))
    make_fault(lab, FileMissing(node="node1", path="/etc/hosts"))
    make_fault(lab, NodeState(node="node1", how="kill"))
    # Silence, and neither a refusal nor a farewell.
    assert "Connection refused" not in _ssh("node1").stderr
    assert not is_alive(lab.nodes[1].init)
    with pytest.raises(NodeFailed, match="it is down"):
        make_fault(lab, DiskFull(node="node1"))
    assert len(clear_faults(lab)) == 3
    told = ssh("node1", "hostname; test -e /tmp/old; echo $? $RANK; cat /proc/sys/kernel/random/boot_id").stdout
    assert told.split()[:2] == ["node1", "1"]
    assert told.split()[2:] not in (["3"], boot_id.split())
    assert ssh("node1", "cat /etc/hosts").returncode == 0
    now = load_lab()
    assert now is not None
    assert measure_stream(now.nodes[0], now.nodes[1]).goodput_gbit_per_s > 0
    make_fault(now, DiskFull(node="node1"))
    assert len(clear_faults(now)) == 1


def test_down_takes_faults_along(no_lab: None, multinode: Command) -> None:
    del no_lab
    lab = up_lab(LabSpec(node_count=2, rate_gbit_per_s=None, python=sys.executable, disk_bytes=1 << 30))
    for one in (
        SshdState(node="node0", how="crowded"),
        Interface(node="node0", name="br-1234"),
        Address(node="node1", address="10.213.1.100/24"),
        NodeState(node="node0", how="freeze"),
        NodeState(node="node1", how="kill"),
    ):
        make_fault(lab, one)
    assert down_lab()
    assert not find_remains()
    assert list_faults() == ()
    refused = multinode("lab", "fault", "clear")
    assert refused.returncode == 2
    assert "no lab stands" in refused.stderr

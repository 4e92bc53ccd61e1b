from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from multinode.lab.state import Lab

pytestmark = pytest.mark.lab

Command = Callable[..., CompletedProcess[str]]


def test_each_node_has_its_own_name_that_resolves_to_loopback(lab: Lab, shell: Command) -> None:
    for node in lab.nodes:
        assert shell(node.name, "hostname; cat /etc/hostname").stdout.split() == [node.name, node.name]
        assert shell(node.name, "getent hosts $(hostname)").stdout.split() == ["127.0.1.1", node.name]


def test_each_node_has_its_own_boot_id_and_machine_id(lab: Lab, shell: Command) -> None:
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        ids = {shell(node.name, f"cat {path}").stdout.strip() for node in lab.nodes}
        assert len(ids) == 2
        assert "" not in ids
        assert not Path(path).exists() or Path(path).read_text().strip() not in ids


def test_nodes_do_not_see_each_others_processes(lab: Lab, shell: Command) -> None:
    sleeper = "sleep 4242.5"
    pid = shell("node0", f"{sleeper} >/dev/null 2>&1 & echo $!").stdout.strip()
    try:
        assert sleeper in shell("node0", "ps -eo args").stdout
        others = shell("node1", "ps -eo args")
        assert sleeper not in others.stdout
        assert "pytest" not in others.stdout
        assert Path(f"/proc/{lab.nodes[0].init.pid}").exists()
    finally:
        assert shell("node0", f"kill {pid}").returncode == 0


def test_orphans_are_reaped(lab: Lab, shell: Command) -> None:
    del lab
    pid = shell("node0", "setsid sleep 0.1 >/dev/null 2>&1 & echo $!").stdout.strip()
    # One that nobody collects keeps its place in /proc for ever.
    gone = f"for i in $(seq 100); do test -e /proc/{pid} || exit 0; sleep 0.05; done; exit 1"
    assert shell("node0", gone).returncode == 0, shell("node0", "ps -eo stat,ppid,args").stdout


def test_network_nics_are_those_of_a_machine_with_docker(lab: Lab, shell: Command) -> None:
    states = "ls /sys/class/net; cd /sys/class/net && cat docker0/operstate ens1f0/operstate eth0/operstate"
    for node in lab.nodes:
        told = shell(node.name, f"{states}; ip -4 -brief address show").stdout
        assert told.split()[:7] == ["docker0", "ens1f0", "eth0", "lo", "down", "up", "up"]
        assert re.search(rf"ens1f0@\S+ +UP +{node.addr}/24", told)
        assert re.search(rf"eth0@\S+ +UP +{node.management_addr}/24", told)


def test_nodes_reach_nodes_and_nothing_else(lab: Lab, ssh: Command) -> None:
    del lab
    hop = "ssh -o BatchMode=yes {} hostname"
    told = ssh("node0", f"ip route show default; {hop.format('node0')}; {hop.format('node1')}")
    assert told.stdout.split() == ["node0", "node1"]


def test_sshd_listens_on_the_management_network_only(lab: Lab, shell: Command) -> None:
    listening = shell("node1", "ss -Hltn").stdout.split()
    assert f"{lab.nodes[1].management_addr}:22" in listening
    assert f"{lab.nodes[1].addr}:22" not in listening
    assert "0.0.0.0:22" not in listening


def test_ssh_accepts_no_password(lab: Lab, shell: Command) -> None:
    del lab
    assert shell("node0", "sshd -T 2>/dev/null | grep -i ^passwordauthentication").stdout.strip().endswith("no")


def test_many_sessions_share_one_connection_and_stdin_arrives(lab: Lab, ssh: Command) -> None:
    del lab
    assert ssh("node1", "cat", stdin="as it stands: $HOME 'x'\n").stdout == "as it stands: $HOME 'x'\n"


def test_exec_runs_in_the_node_and_returns_its_exit_code(lab: Lab, multinode: Command) -> None:
    del lab
    done = multinode("lab", "exec", "node1", "--", "sh", "-c", 'echo "$(hostname) $HOME $(pwd) ${LANG-unset}"; exit 7')
    assert done.stdout == "node1 /root /root unset\n"
    assert done.returncode == 7
    assert multinode("lab", "exec", "node1", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_exec_keeps_words_apart(lab: Lab, multinode: Command) -> None:
    del lab
    assert multinode("lab", "exec", "node0", "--", "printf", "%s|", "a b", "$HOME", "; id").stdout == "a b|$HOME|; id|"


def test_exec_on_a_node_that_is_not_there_is_a_usage_error(lab: Lab, multinode: Command) -> None:
    del lab
    done = multinode("lab", "exec", "node7", "--", "true")
    assert done.returncode == 2
    assert "no node 'node7'" in done.stderr
    assert "node0 to node1" in done.stderr

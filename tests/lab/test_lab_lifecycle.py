from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest

from multinode.lab.cluster import exec_in_node, find_remains, require_lab, up_lab
from multinode.lab.state import STATE_DIR, Lab, is_alive, load_lab, poll, save_lab
from tests.golden import Golden

from .conftest import DEADLINE_S, REPOSITORY, SMALL
from .launching import call_here

pytestmark = pytest.mark.lab
without_lab = pytest.mark.usefixtures("no_lab")

Command = Callable[..., CompletedProcess[str]]


def _machine() -> dict[str, list[str]]:
    """What a lab could leave behind: namespaces, interfaces, mounts, first processes, directories."""
    netns = Path("/run/netns")
    cmdlines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return {
        "namespaces": sorted(path.name for path in netns.iterdir()) if netns.is_dir() else [],
        "interfaces": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "mounts": [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "processes": [line.decode() for line in cmdlines if b"node_init" in line],
        "directories": sorted(path.name for path in Path("/run").iterdir() if path.name == "multinode"),
    }


@without_lab
def test_down_leaves_the_machine_as_it_was(multinode: Command, golden: Golden) -> None:
    before = _machine()
    up = multinode("lab", "up", "--nodes", "3", "--rate", "none", "--json")
    assert up.returncode == 0, up.stderr
    told = json.loads(up.stdout)
    assert told["schema"] == "multinode.lab/2"
    assert [node["name"] for node in told["nodes"]] == ["node0", "node1", "node2"]
    assert len(told["links"]) == 4
    assert _machine() != before
    sleeper = ["ssh", "-F", str(STATE_DIR / "ssh_config"), "node2", "setsid sleep 4243 >/dev/null 2>&1 & echo $!"]
    assert subprocess.run(sleeper, capture_output=True, check=True).stdout
    assert multinode("lab", "down").returncode == 0
    assert _machine() == before
    again = call_here("lab", "down")
    assert again.returncode == 0
    golden.check("lab_down_again.txt", again.stderr)
    assert _machine() == before


@without_lab
def test_down_ends_no_run_that_nobody_said_it_may_end(multinode: Command, golden: Golden) -> None:
    assert multinode("lab", "up", "--nodes", "2", "--rate", "none").returncode == 0
    run = "20260101-000000-abcd"
    worker = f"MULTINODE_RUN_ID={run}.1 setsid sleep 4243 >/dev/null 2>&1 & echo $!"
    subprocess.run(["ssh", "-F", str(STATE_DIR / "ssh_config"), "node1", worker], capture_output=True, check=True)
    refused = multinode("lab", "down")
    bare = multinode("check")
    assert (refused.returncode, bare.returncode) == (2, 2)
    told = {"lab down": refused.stderr, "check": bare.stderr}
    golden.check_texts("lab_in_use", {case: re.sub(r"for \S+ s", "for TIME", text) for case, text in told.items()})
    assert multinode("check", "--force", "--no-bandwidth").returncode != 2
    assert load_lab() is not None
    assert multinode("lab", "down", "--force").returncode == 0
    assert load_lab() is None


@without_lab
def test_without_a_lab_the_verbs_say_how_to_make_one(golden: Golden) -> None:
    status = call_here("lab", "status", "--json")
    assert json.loads(status.stdout) == {"schema": "multinode.lab/2", "hostfile": None, "nodes": []}
    assert status.returncode == 1
    told = {}
    for line, code in {"status": 1, "rate all 1gbit": 2, "exec node0 true": 2}.items():
        done = call_here("lab", *line.split())
        assert (done.returncode, done.stdout) == (code, "")
        told[f"lab {line}"] = done.stderr
    golden.check_texts("no_lab", told)


MOMENTS = pytest.mark.parametrize("moment", ["creating keys and links", "starting nodes", "measuring links"])


@without_lab
@MOMENTS
def test_down_after_sigkill_of_up(moment: str, golden: Golden) -> None:
    before = _machine()
    assert _signal_up_at(moment, signal.SIGKILL) == -signal.SIGKILL
    assert load_lab() is None
    refused = call_here("lab", "up")
    assert refused.returncode == 2
    golden.check("lab_up_after_a_kill.txt", re.sub(r"(?<=earlier lab remain: ).*", "REMAINS", refused.stderr))
    assert call_here("lab", "down").returncode == 0
    assert _machine() == before


@without_lab
@MOMENTS
def test_ctrl_c_takes_back_what_was_begun(moment: str) -> None:
    before = _machine()
    assert _signal_up_at(moment, signal.SIGINT) == 130
    assert _machine() == before


@without_lab
@pytest.mark.parametrize("lost", ["state.json", "directory", "namespaces"])
def test_down_without_its_records(lost: str) -> None:
    before = _machine()
    up_lab(SMALL, measure=False)
    if lost == "namespaces":
        subprocess.run(["ip", "-batch", "-"], input=b"netns del mn-node0\nnetns del mn-node1\n", check=True)
    if lost == "state.json":
        (STATE_DIR / lost).unlink()
    else:
        shutil.rmtree(STATE_DIR)
    assert call_here("lab", "status").returncode == 1
    assert call_here("lab", "down").returncode == 0
    assert _machine() == before


@without_lab
def test_a_lab_in_a_container_is_none_of_ours() -> None:
    # Network and mounts apart, process list shared: as the machine around a container sees what is in it.
    lab = f"{sys.executable} -m multinode lab"
    commands = f"mount -t tmpfs tmpfs /run; {lab} up --rate none; cat; {lab} down"
    inside = ["unshare", "--net", "--mount", "sh", "-c", commands]
    with subprocess.Popen(
        inside, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as container:
        assert container.stdout is not None
        assert any(b"2 nodes are up" in line for line in container.stdout)
        assert call_here("lab", "down").stdout == ""
        told, _ = container.communicate(timeout=DEADLINE_S)
    assert b"removed namespaces: 3, processes: 4" in told


def test_a_lab_from_before_a_reboot_does_not_stand(small: Lab, golden: Golden) -> None:
    lab = small
    save_lab(msgspec.structs.replace(lab, controller_boot_id="another boot"))
    status = call_here("lab", "status")
    assert status.returncode == 1
    golden.check("lab_before_a_reboot.txt", status.stderr)
    assert call_here("lab", "down").returncode == 0


def test_a_second_lab_is_refused_and_the_first_one_stays(small: Lab, golden: Golden) -> None:
    lab = small
    refused = call_here("lab", "up")
    assert refused.returncode == 2
    golden.check("lab_is_up.txt", refused.stderr)
    assert require_lab() == lab
    assert exec_in_node(lab.nodes[1], ["true"]) == 0


@without_lab
def test_up_that_fails_on_the_nodes_takes_everything_back(golden: Golden) -> None:
    before = _machine()
    # /var/run is /run, and that is each node's own: there for the controller, not for them.
    python = Path("/var/run/multinode-test-python")
    python.symlink_to(sys.executable)
    try:
        failed = call_here("lab", "up", "--python", str(python))
    finally:
        python.unlink()
    assert failed.returncode == 1
    golden.check("lab_up_without_python.txt", failed.stderr)
    assert _machine() == before


@without_lab
def test_addresses_that_are_in_use_are_refused(golden: Golden) -> None:
    subprocess.run(["ip", "address", "add", "10.99.5.1/32", "dev", "lo"], check=True)
    try:
        refused = call_here("lab", "up", "--network", "10.99.4.0/23")
    finally:
        subprocess.run(["ip", "address", "del", "10.99.5.1/32", "dev", "lo"], check=True)
    assert refused.returncode == 2
    golden.check("lab_addresses_in_use.txt", refused.stderr)
    assert not find_remains()


@without_lab
def test_another_network_and_cores_of_their_own(multinode: Command) -> None:
    cores = len(os.sched_getaffinity(0)) // 2
    up = multinode("lab", "up", "--network", "10.99.4.0/23", "--cores-per-node", str(cores))
    assert up.returncode == 0, up.stderr
    for node in ("node0", "node1"):
        assert multinode("lab", "exec", node, "--", "nproc").stdout.strip() == str(cores)
        over_ssh = ["ssh", "-F", str(STATE_DIR / "ssh_config"), node, "nproc; hostname -I"]
        nproc, *addresses = subprocess.run(over_ssh, capture_output=True, text=True, check=True).stdout.split()
        assert nproc == str(cores)
        assert f"10.99.5.{1 + int(node[-1])}" in addresses
    refused = call_here("lab", "up", "--cores-per-node", str(cores + 1))
    assert refused.returncode == 2


def test_a_killed_node_is_down_and_the_others_are_not(small: Lab, golden: Golden) -> None:
    lab = small
    dead, alive = lab.nodes[1], lab.nodes[0]
    os.kill(dead.init.pid, signal.SIGKILL)
    assert _wait_for(lambda: not Path(f"/proc/{dead.sshd.pid}").exists() and not is_alive(dead.init))
    states = {node["name"]: node["state"] for node in json.loads(call_here("lab", "status", "--json").stdout)["nodes"]}
    assert states == {alive.name: "up", dead.name: "down"}
    done = call_here("lab", "exec", dead.name, "--", "true")
    assert done.returncode == 1
    golden.check("lab_node_is_down.txt", done.stderr)
    assert exec_in_node(alive, ["true"]) == 0


@without_lab
def test_without_root_it_says_so(golden: Golden) -> None:
    # A user like any other, who may yet read the interpreter's files, wherever they lie.
    user = (
        "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search"
    )
    refused = _run([*user.split(), sys.executable, "-m", "multinode", "lab", "up"])
    assert refused.returncode == 2
    golden.check("lab_without_root.txt", refused.stderr)
    assert not find_remains()


@without_lab
def test_everything_that_is_missing_is_listed_with_what_installs_it(tmp_path: Path, golden: Golden) -> None:
    refused = _run(["env", f"PATH={tmp_path}", sys.executable, "-m", "multinode", "lab", "up"])
    assert refused.returncode == 2
    golden.check("lab_without_programs.txt", refused.stderr)


def _run(command: list[str]) -> CompletedProcess[str]:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def _signal_up_at(moment: str, number: signal.Signals) -> int:
    """Start `lab up`, send it a signal as soon as it says this, and return its exit code."""
    # A shell starts what runs in its background with SIGINT ignored, and this test may run there.
    listening = ["env", "--default-signal=INT"]
    with subprocess.Popen(
        [*listening, sys.executable, "-m", "multinode", "lab", "up"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip() == moment:
                process.send_signal(number)
                break
        return process.wait(timeout=DEADLINE_S)


def _wait_for(condition: Callable[[], bool]) -> bool:
    return any(condition() for _ in poll(DEADLINE_S))

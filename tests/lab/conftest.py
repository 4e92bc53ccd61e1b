"""A lab of two nodes for all tests that want one, and none for those that make and unmake their own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from multinode.lab.cluster import Remains, down_lab, find_remains, login_environment, ns_command, require_lab, up_lab
from multinode.lab.nodes import REFRESH_SCRIPT, SSH_CONFIG
from multinode.lab.state import Lab, LabSpec, is_alive, load_lab, poll
from tests.equipment.cgroups import Controller, find_top
from tests.equipment.faults import Fault, clear_faults, make_fault

from . import launching
from .supervised import GoFile

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SHARED = LabSpec(node_count=2, rate_gbit_per_s=1.0, python=sys.executable, disk_bytes=2 << 30)
MADE = LabSpec(node_count=2, rate_gbit_per_s=None, python=sys.executable, disk_bytes=1 << 30)
SMALL = LabSpec(node_count=2, rate_gbit_per_s=None, python=sys.executable, disk_bytes=1 << 28)

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that want another lab, or none, come later: there is one lab a machine, and it is kept while it will do."""
    others = ("no_lab", "small", "made", "login", "pinned")
    items.sort(
        key=lambda item: (
            not {"lab", "long"} & set(item.keywords),
            *(name in getattr(item, "fixturenames", ()) for name in others),
        )
    )


def stand_lab(spec: LabSpec, prepare: Callable[[Lab], None] = lambda _: None) -> Lab:
    """A lab of this kind, whole and without faults: the one that stands, or else a new one that was prepared."""
    lab = load_lab()
    if lab is not None and lab.spec == spec:
        clear_faults(lab)
        lab = require_lab()
        if all(is_alive(node.init) and node.rate_gbit_per_s == spec.rate_gbit_per_s for node in lab.nodes):
            return lab
    down_lab()
    lab = up_lab(spec, measure=False)
    for node in lab.nodes:
        # A node has the start-up files of this machine's root, and bash reads this one for every command over SSH.
        subprocess.run([*ns_command(node), "truncate", "-s", "0", "/root/.bashrc"], check=True)
    prepare(lab)
    return lab


@pytest.fixture(scope="session")
def _clean_machine() -> Iterator[None]:
    """This machine's one lab is ours until the session ends; sessions that run at the same time wait for each other."""
    # An abstract name belongs to the network namespace, as the lab does, and is gone with the process that holds it.
    with socket.socket(socket.AF_UNIX) as lock:
        if not any(_is_ours(lock) for _ in poll(DEADLINE_S)):
            pytest.fail("another test session uses this machine's lab; wait for its end")
        remains = find_remains()
        if remains == Remains(cgroups=remains.cgroups):
            # Control groups are named after a network namespace: after one that was killed, its number may be ours now.
            down_lab()
            remains = find_remains()
        if remains:
            pytest.fail(f"a lab is already up, or its remains ({remains.describe()}); run: multinode lab down")
        yield
        down_lab()


@pytest.fixture
def lab(_clean_machine: None) -> Lab:
    """Two nodes at 1 Gbit/s, as they are now: one that an earlier test killed has come back as another process."""
    return stand_lab(SHARED)


@pytest.fixture(scope="module")
def module_lab(_clean_machine: None) -> Lab:
    """The same two nodes, for runs that all tests of a module look at."""
    return stand_lab(SHARED)


@pytest.fixture(scope="session")
def deepspeed_compiled() -> None:
    """No node compiles DeepSpeed's CPU operation, while its peers wait for it."""
    program = [sys.executable, "scripts/compile_deepspeed.py"]
    subprocess.run(program, cwd=REPOSITORY, check=True, capture_output=True, timeout=10 * DEADLINE_S)


@pytest.fixture
def no_lab(_clean_machine: None) -> Iterator[None]:
    """No lab stands when the test begins, and whatever it leaves is taken away."""
    down_lab()
    yield
    down_lab()


@pytest.fixture(scope="session")
def control_groups(_clean_machine: None) -> Iterator[None]:
    """Control groups, where this machine has mounted none that can be seen, as in a container of few mounts."""
    with contextlib.ExitStack() as mounts:
        for controller in get_args(Controller):
            if find_top(controller) is None:
                mounts.enter_context(_mounted(controller))
        yield
        # Its groups cannot be found any more once they are not mounted.
        down_lab()


@pytest.fixture
def made(control_groups: None) -> Iterator[Lab]:
    """A lab without a line rate, whose nodes see their control groups; its faults are cleared at the end."""
    del control_groups
    lab = stand_lab(MADE)
    yield lab
    if load_lab() is not None:
        clear_faults(lab)


@pytest.fixture
def small(_clean_machine: None) -> Iterator[Lab]:
    """A lab without a line rate and with little disk; its faults are cleared at the end."""
    lab = stand_lab(SMALL)
    yield lab
    if load_lab() is not None:
        clear_faults(lab)


def _run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options)


@pytest.fixture(scope="session")
def multinode() -> Command:
    """The command line in a process of its own."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return _run([sys.executable, "-m", "multinode", *arguments], cwd=REPOSITORY)

    return call


@pytest.fixture(scope="session")
def ssh() -> Command:
    """OpenSSH's own client with the lab's configuration: node, command, and optionally what it reads."""

    def call(node: str, command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return _run(["ssh", "-F", str(SSH_CONFIG), "-o", "BatchMode=yes", node, command], input=stdin)

    return call


@pytest.fixture(scope="session")
def shell() -> Command:
    """A shell on a node, as `lab exec` starts one: where SSH itself is not what is tested, it takes too long."""

    def call(node: str, command: str) -> subprocess.CompletedProcess[str]:
        argv = [*ns_command(require_lab().node(node)), "bash", "-c", f". {REFRESH_SCRIPT}; cd; {command}"]
        return _run(argv, env=login_environment({}), stdin=subprocess.DEVNULL)

    return call


@pytest.fixture
def command(tmp_path: Path) -> Iterator[launching.Command]:
    """The command with a run directory of its own; what still runs is stopped, and nothing may be left anywhere."""
    running = launching.Command(tmp_path / "runs")
    yield running
    for path in running.runs.glob("*/run.json"):
        if launching.processes_of(path.parent.name):
            running.run("stop", path.parent.name, "--grace-period", "0")
    launching.assert_nothing_left(running)


@pytest.fixture
def go_file(shared_dir: Path) -> GoFile:
    return GoFile(shared_dir / "until")


@pytest.fixture
def fault(lab: Lab) -> Iterator[Callable[[Fault], None]]:
    """Makes a fault; all are cleared at the end."""
    yield lambda one: make_fault(lab, one)
    clear_faults(lab)


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """An empty directory of the controller that nodes see, too."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="multinode-test-") as path:
        yield Path(path)


@contextlib.contextmanager
def _mounted(controller: str) -> Iterator[None]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    options = next((line.split(":")[1] for line in lines if controller in line.split(":")[1].split(",")), None)
    kind = ["cgroup", "-o", options] if options else ["cgroup2"]
    # Nothing that deletes a tree may ever come near this place: it would take the groups of the whole machine along.
    place = tempfile.mkdtemp(dir="/var/tmp", prefix="multinode-test-")
    try:
        subprocess.run(["mount", "-t", *kind, "none", place], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)
    finally:
        Path(place).rmdir()


def _is_ours(lock: socket.socket) -> bool:
    try:
        lock.bind("\0multinode-test-lab")
    except OSError:
        return False
    return True

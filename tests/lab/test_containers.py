"""Trainings in namespaces like a container's: own processes, own mounts, a small /dev/shm, the network of the node."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.nodes import SSH_CONFIG
from multinode.lab.state import Lab
from tests.lab.launching import Command, assert_no_agents, processes_of, wait_for
from tests.lab.supervised import read_document

pytestmark = [pytest.mark.lab]

PORT = 2222
# As docker makes it if nothing is said.
SHM_MIB = 64
SCRIPT = ("--", "tests/lab/train_mlp.py", "--width", "256")
# Its processes see themselves alone, and the first one is sshd, as where an image starts nothing else.
CONTAINER = f"""
mount -t tmpfs -o size={SHM_MIB}m,mode=1777 tmpfs /dev/shm
exec /usr/sbin/sshd -D -o ListenAddress=$1:{PORT}
"""
LOADING = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(4 << 20)

dist.init_process_group("gloo")
for batch in DataLoader(Images(), batch_size=8, num_workers=2):
    dist.all_reduce(batch[0, :8])
"""


@pytest.fixture
def containers(lab: Lab, tmp_path: Path) -> Iterator[str]:
    """A hostfile of a container on each node."""
    with contextlib.ExitStack() as stack:
        for node in lab.nodes:
            argv = (*ns_command(node), "unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
            address = node.management_addr
            container = [*argv, "sh", "-ec", CONTAINER, "sh", address]
            # unshare complains of the signal that ends it.
            stack.enter_context(subprocess.Popen(container, stderr=subprocess.DEVNULL))
            # The end of its first process is the end of all.
            stack.callback(os.kill, wait_for(functools.partial(first_process, address)), signal.SIGKILL)
        lab_keys = SSH_CONFIG.parent / "known_hosts"
        # `NAME,ADDRESS TYPE KEY` of each node.
        entries = [line.partition(" ") for line in lab_keys.read_text().splitlines()]
        keys = "".join(f"[{names.split(',')[1]}]:{PORT} {key}\n" for names, _, key in entries)
        (tmp_path / "known_hosts").write_text(keys)
        config = SSH_CONFIG.read_text().replace("Port 22\n", "")
        (tmp_path / "config").write_text(config.replace(str(lab_keys), str(tmp_path / "known_hosts")))
        hosts = Path(lab.hostfile).read_text().replace(str(SSH_CONFIG), f"{tmp_path / 'config'} port={PORT}")
        (tmp_path / "hosts").write_text(hosts)
        yield str(tmp_path / "hosts")


def first_process(address: str) -> int:
    """The first process of the container at an address; 0 if it has not begun."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (path / "cmdline").read_bytes()
            if title.startswith(b"sshd:") and f"ListenAddress={address}:{PORT} [listener]".encode() in title:
                return int(path.name)
    return 0


@pytest.mark.torch
def test_a_training_in_containers_is_measured_and_stopped(containers: str, lab: Lab, command: Command) -> None:
    launch = ("launch", "--hosts", containers, "--no-check", "--json", *SCRIPT, "--steps")
    code, trained = command.code_and_document(*launch, "12")
    assert (code, trained["status"], trained["world_size"]) == (0, "succeeded", 4), trained
    assert command.document("show", "last", "--json")["summary"]["samples_per_s"]["value"] > 0
    with command.running(*launch, "100000") as process:
        (run_id,) = wait_for(lambda: [one for one in run_ids(command) if one != trained["run_id"]])
        # Both have begun to train: no process comes or goes.
        places = [f"{run_id}/samples/node-{node.node_rank}/*.jsonl" for node in lab.nodes]
        wait_for(lambda: all(any(command.runs.glob(place)) for place in places))
        inside = {Path(f"/proc/{pid}/ns/pid").stat().st_ino for pid in processes_of(run_id)}
        assert len(inside) == len(lab.nodes)
        assert not inside & {Path(f"/proc/{node.init.pid}/ns/pid").stat().st_ino for node in lab.nodes}
        stopped = command.run("stop", run_id, "--grace-period", "1")
        assert stopped.returncode == 0, stopped.stderr
        read_document(process)
    assert not processes_of(run_id)
    assert_no_agents()


@pytest.mark.torch
def test_a_small_shm_is_explained(containers: str, command: Command, shared_dir: Path) -> None:
    (shared_dir / "loading.py").write_text(LOADING)
    failed = command.run("launch", "--hosts", containers, "--no-check", "--", str(shared_dir / "loading.py"))
    assert failed.returncode == 1
    screen = failed.stderr[failed.stderr.index("error: ") :]
    assert "unable to allocate shared memory(shm)" in screen
    assert "/dev/shm" in screen
    assert "--shm-size=16g" in screen


def run_ids(command: Command) -> list[str]:
    """The runs that there are."""
    return [path.parent.name for path in command.runs.glob("*/run.json")]

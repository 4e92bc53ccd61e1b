"""multinode in allocations of a real Slurm, whose nodes nobody reaches by SSH; node 0 is the login node, too."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import login_environment, ns_command
from multinode.lab.nodes import REFRESH_SCRIPT
from multinode.lab.state import Lab, LabSpec
from multinode.units import goodput_gb_per_s
from tests.equipment.faults import clear_faults, make_fault
from tests.equipment.faults.sshd import SshdState
from tests.equipment.slurm import start_slurm, with_slurm

from .conftest import stand_lab
from .launching import DEADLINE_S, REPOSITORY, RUN_DEADLINE_S, assert_no_agents, kill, processes_of, wait_for
from .supervised import STAND_IN, TRAIN

pytestmark = [pytest.mark.lab]

SPEC = LabSpec(node_count=2, rate_gbit_per_s=1.0, python=sys.executable, disk_bytes=2 << 30)
# On node 0's own disk, which is where it has its home directory, too.
RUNS = "/var/tmp/runs"
LAUNCH = ("launch", "--hosts", "auto", "--json", "--no-check", "--env", f"PYTHONPATH={STAND_IN}")
SUBMIT = ("submit", "-N2", "--", "launch", "--no-check", "--env", f"PYTHONPATH={STAND_IN}", "--", TRAIN)
GPUS = "".join(f"echo '{n}, Fake, 1000, 0, 550.1, GPU-{n}a, Disabled'; " for n in range(2))
NVIDIA_SMI = f"#!/bin/sh\ncase $1 in --query-gpu=*) {GPUS};; esac\n"


QUICK_YAML = """
model_name_or_path: m
stage: sft
finetuning_type: lora
per_device_train_batch_size: 1
max_steps: 8
output_dir: out
"""


class Login:
    """A shell on node 0, in this repository with its interpreter first on PATH."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.root = Path(f"/proc/{lab.nodes[0].init.pid}/root")
        self.runs = self.root / RUNS.lstrip("/")

    def argv(self, *words: str) -> list[str]:
        path = f"{Path(sys.executable).parent}:{login_environment({})['PATH']}"
        script = f'. {REFRESH_SCRIPT}; cd {REPOSITORY} && exec env PATH={path} MULTINODE_RUNS={RUNS} "$@"'
        return [*ns_command(self._lab.nodes[0]), "sh", "-c", script, "sh", *words]

    def run(self, *words: str, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        return subprocess.run(
            self.argv(*words),
            env=login_environment({}),
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def multinode(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "multinode", *words)

    def said(self, *words: str) -> str:
        """What a command prints that must end well."""
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command in the background; at the end all jobs are cancelled, and it with them."""
        process = subprocess.Popen(
            self.argv(*words), env=login_environment({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                # What runs on the node is no child of ours: it ends with its job.
                self.run("scancel", "--user=root")
            process.communicate(timeout=DEADLINE_S)

    def run_id(self, before: set[str]) -> str:
        """The run that was not there before."""
        (new,) = wait_for(lambda: self.run_ids() - before)
        return new

    def run_ids(self) -> set[str]:
        return {path.parent.name for path in self.runs.glob("*/run.json")}

    def read(self, run_id: str, name: str = "run.json") -> Any:
        return json.loads((self.runs / run_id / name).read_text())

    def trains(self, run_id: str) -> bool:
        """Whether workers of both nodes have recorded a step that came home."""
        texts = [path.read_text() for path in self.runs.glob(f"{run_id}/samples/node-[01]/rank-*.jsonl")]
        return sum('"kind": "step"' in text for text in texts) == 2


@pytest.fixture(scope="module")
def login(_clean_machine: None) -> Iterator[Login]:
    lab = stand_lab(with_slurm(SPEC), start_slurm)
    for node in lab.nodes:
        make_fault(lab, SshdState(node=node.name, how="stop"))
    yield Login(lab)
    clear_faults(lab)


@pytest.fixture(autouse=True)
def nothing_left(login: Login) -> Iterator[None]:
    """No job, no process and no agent is left by a test."""
    yield
    login.run("scancel", "--user=root")
    runs = login.run_ids()
    wait_for(lambda: not any(map(processes_of, runs)))
    assert_no_agents()
    wait_for(lambda: not login.said("squeue", "--noheader"))


@contextmanager
def training(login: Login, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A training in an allocation, once both nodes train: salloc, the run, the job."""
    before = login.run_ids()
    command = (sys.executable, "-m", "multinode", *LAUNCH, *options, "--", TRAIN)
    with login.running("salloc", "-N2", *command) as salloc:
        run_id = login.run_id(before)
        wait_for(lambda: login.trains(run_id))
        yield salloc, run_id, login.said("squeue", "--noheader", "--format=%i")


def controller_of(run_id: str, login: Login) -> int:
    """The process that follows a run, as this machine numbers it."""
    found = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if b"\0launch\0--hosts\0auto\0" in read_bytes(path / "cmdline")
        and b"multinode" in read_bytes(path / "cmdline")
        and b"salloc" not in read_bytes(path / "cmdline")
    ]
    assert login.trains(run_id)
    (pid,) = found
    return pid


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.torch
@pytest.mark.usefixtures("tiny")
def test_the_main_verbs_work_in_an_allocation(login: Login) -> None:
    # LLaMA-Factory trains; what starts its workers on each node has tests of its own.
    real = f"--env PYTHONPATH={STAND_IN} --env REAL_TORCH=1 --env OMP_NUM_THREADS=1"
    job = f"--engine torchrun {real} --env DISABLE_VERSION_CHECK=1 --env DS_ACCELERATOR=cpu"
    verbs = {
        "check": f"check --hosts auto --json configs/tiny_sft.yaml {job}",
        "nccl-test": f"nccl-test --hosts auto --json -b 4M -e 4M --no-tcp --backend gloo {real}",
        "launch": f"launch --hosts auto --json configs/tiny_sft.yaml --set max_steps=12 {job}",
        "logs": "logs last --json",
    }
    script = "; ".join(f"{sys.executable} -m multinode {verb} > /var/tmp/{name}.json" for name, verb in verbs.items())
    done = login.run("salloc", "-N2", "sh", "-c", script, deadline_s=RUN_DEADLINE_S)
    found = {name: json.loads((login.root / f"var/tmp/{name}.json").read_text()) for name in verbs}
    assert found["launch"]["status"] == "succeeded", done.stderr
    assert (found["launch"]["world_size"], found["launch"]["summary"]["steps"]) == (2, 12)
    nodes = login.read(found["launch"]["run_id"], "plan.json")["nodes"]
    assert [node["place"]["endpoint"]["addr"] for node in nodes] == ["10.213.1.1", "10.213.1.2"]
    assert not [one for one in found["check"]["findings"] if one["severity"] == "error"], done.stderr
    assert [node["name"] for node in found["logs"]["nodes"]] == ["node0", "node1"]
    # It went over the shaped link; how near to its rate, a busy machine does not say.
    assert 0 < found["nccl-test"]["rows"][-1]["busbw_gb_per_s"] < 1.05 * goodput_gb_per_s(1.0)


def test_cancelling_the_job_stops_the_run_in_order(login: Login) -> None:
    with training(login, "--grace-period", "2") as (salloc, run_id, job):
        login.said("scancel", job)
        salloc.communicate(timeout=DEADLINE_S)
    assert login.read(run_id)["status"] == "stopped"
    assert {node["status"]["processes_left"] for node in login.read(run_id)["nodes"]} == {0}


@pytest.mark.thorough
def test_the_time_limit_of_the_job_stops_the_run_in_order(login: Login) -> None:
    with training(login, "--grace-period", "2") as (salloc, run_id, job):
        # Slurm counts in minutes, from the beginning of the job, and looks twice a minute.
        login.said("scontrol", "update", f"jobid={job}", "timelimit=1")
        said, _ = salloc.communicate(timeout=DEADLINE_S)
    assert login.read(run_id)["status"] == "stopped", said
    assert {node["status"]["processes_left"] for node in login.read(run_id)["nodes"]} == {0}


def test_a_contrast_takes_its_sides_from_the_allocation(login: Login) -> None:
    (login.root / "var/tmp/sft.yaml").write_text(QUICK_YAML)
    contrast = ("contrast", "--hosts", "auto", "--json", "--no-check", "--repeats", "1", "--steps", "3")
    words = (sys.executable, "-m", "multinode", *contrast, "--env", f"PYTHONPATH={STAND_IN}", "/var/tmp/sft.yaml")
    done = login.run("salloc", "-N2", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[side]["node_names"] for side in ("baseline", "candidate")] == [["node0"], ["node0", "node1"]]
    assert found["candidate"]["speedup"]["value"] > 0


def test_a_killed_controller_takes_its_job_along_and_attach_records_the_end(login: Login) -> None:
    with training(login) as (salloc, run_id, _):
        kill(controller_of(run_id, login))
        salloc.communicate(timeout=DEADLINE_S)
        wait_for(lambda: not processes_of(run_id))
        assert login.read(run_id)["status"] == "running"
        done = login.multinode("attach", run_id)
    assert "has ended" in done.stderr + done.stdout
    assert login.read(run_id)["status"] == "lost"


def test_a_node_that_slurm_takes_down_ends_the_run(login: Login) -> None:
    try:
        with training(login, "--grace-period", "1") as (salloc, run_id, _):
            login.said("scontrol", "update", "nodename=node1", "state=down", "reason=test")
            salloc.communicate(timeout=DEADLINE_S)
            assert login.read(run_id)["status"] in {"lost", "failed", "stopped"}
    finally:
        login.run("scontrol", "update", "nodename=node1", "state=resume")
    wait_for(lambda: login.said("sinfo", "--noheader", "--format=%T") == "idle")


def test_a_submitted_job_is_watched_and_stopped_from_the_login_node(login: Login) -> None:
    before = login.run_ids()
    said = login.multinode(*SUBMIT)
    assert (said.returncode, said.stdout.split()[:3]) == (0, ["submitted", "Slurm", "job"])
    run_id = login.run_id(before)
    wait_for(lambda: login.trains(run_id))
    with login.running(sys.executable, "-m", "multinode", "attach", run_id) as watching:
        stopped = login.multinode("stop", run_id, "--grace-period", "1", "--json")
        told, _ = watching.communicate(timeout=DEADLINE_S)
    assert stopped.returncode == 0, f"{stopped.stderr}\nattach: {told}"
    assert json.loads(stopped.stdout)["status"] == "stopped"
    assert "another multinode process is following run" in told
    assert watching.returncode == 130
    job = int(said.stdout.split()[3])
    printed = (login.root / str(REPOSITORY).lstrip("/") / f"slurm-{job}.out").read_text()
    assert run_id in printed


@pytest.fixture
def gpus(login: Login) -> Iterator[None]:
    """Both nodes have a nvidia-smi that lists two GPUs."""
    install = f"printf %s {shlex.quote(NVIDIA_SMI)} > /usr/bin/nvidia-smi; chmod 755 /usr/bin/nvidia-smi"
    for command in (install, "rm /usr/bin/nvidia-smi"):
        for node in ("node0", "node1"):
            login.said("srun", "-w", node, "-N1", "sh", "-c", command)
        if command == install:
            yield


@pytest.mark.usefixtures("gpus")
def test_a_run_uses_the_gpus_that_slurm_gives_it_and_no_others(login: Login) -> None:
    # Slurm numbers what it gives; the second GPU is the first that is left beside somebody else's job.
    with login.running("salloc", "-K", "-N2", "--gpus-per-node=1", "sleep", "600"):
        wait_for(lambda: "R" in login.said("squeue", "--noheader", "--format=%t"))
        before = login.run_ids()
        # The GPUs are made up, and torch finds none of them.
        command = (sys.executable, "-m", "multinode", *LAUNCH, "--no-check", "--", TRAIN, "--steps", "3")
        done = login.run("salloc", "-N2", "--gpus-per-node=1", *command)
        assert done.returncode == 0, done.stderr
    nodes = login.read(login.run_id(before), "plan.json")["nodes"]
    assert [node["command"]["env"]["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["1"] * 2
    # A job that asked for none gets none, though Slurm does not hide them here.
    before = login.run_ids()
    done = login.run("salloc", "-N2", *command)
    nodes = login.read(login.run_id(before), "plan.json")["nodes"]
    assert [(node["place"]["ranks"], node["gpus"]) for node in nodes] == [([0], None), ([1], None)], done.stderr


def test_detaching_in_an_allocation_is_refused_and_outside_of_one_nothing_begins(login: Login) -> None:
    inside = login.run("salloc", "-N1", sys.executable, "-m", "multinode", *LAUNCH, "--detach", "--", TRAIN)
    assert "multinode submit" in inside.stderr
    outside = login.multinode(*LAUNCH, "--", TRAIN)
    assert (outside.returncode, "this shell has no nodes from a scheduler" in outside.stderr) == (2, True)

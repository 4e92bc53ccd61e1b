"""A node whose sshd falls silent at a step of the protocol: every verb ends with a clear error that names the node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multinode.core.cluster.cluster import Cluster
from multinode.core.run.run import Run
from multinode.store.run_directory import RunDirectory
from tests.launch.scripted import make_plan
from tests.transport.silent_sshd import silent_sshd
from tests.workflows.test_advise import JOB, keep

# The longest deadlines of a verb's steps together are half of it: reached by what waits without one.
HANGS_S = 300.0
STEPS = ["accept", "banner", "key exchange", "auth", "channel", "exec", "output", "input"]
EACH_COMMIT = {"output"}
RUNNING = ("20260101-000000-aaaa", "20260101-000000-aaab", "20260101-000000-aaac")
MEASURED = "20260101-000000-bbbb"
VERBS = {
    "init": "init box --output new.hosts",
    "check": "check --hosts hosts",
    "launch": "launch --hosts hosts -- train.py",
    "launch --no-check": "launch --no-check --hosts hosts -- train.py",
    "nccl-test": "nccl-test --hosts hosts",
    "bench": "bench --hosts hosts",
    "contrast": "contrast --hosts hosts -- train.py",
    "sweep": "sweep --hosts hosts job.yaml --grid per_device_train_batch_size=1,2",
    "advise": f"advise {MEASURED} --try 1 --hosts hosts --job job.yaml",
    "attach": f"attach {RUNNING[0]}",
    "attach --fetch": f"attach {RUNNING[1]} --fetch out",
    "attach --hosts": "attach --hosts hosts 20260101-000000-cccc",
    "stop": f"stop {RUNNING[2]}",
    "stop --hosts": "stop --hosts hosts 20260101-000000-cccc",
    "clean": "clean --hosts hosts",
}


@pytest.mark.parametrize(
    "step", [step if step in EACH_COMMIT else pytest.param(step, marks=pytest.mark.thorough) for step in STEPS]
)
def test_every_verb_ends_with_an_error_that_names_the_node(step: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(JOB)
    with silent_sshd(step, tmp_path) as server:
        config = server.node().ssh_config
        (tmp_path / "hosts").write_text("".join(f"{name} slots=1 ssh_config={config}\n" for name in ("box", "jump")))
        store(tmp_path / "runs", (tmp_path / "hosts").read_text())
        ssh = tmp_path / "bin/ssh"
        ssh.parent.mkdir()
        # A verb that takes a name instead of a hostfile reads the user's own configuration.
        ssh.write_text(
            f'#!/bin/sh\ncase "$*" in *-F*) exec /usr/bin/ssh "$@";; esac\nexec /usr/bin/ssh -F {config} "$@"\n'
        )
        ssh.chmod(0o755)
        environ = {**os.environ, "MULTINODE_RUNS": str(tmp_path / "runs"), "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
        begun = time.monotonic()
        started = {
            verb: subprocess.Popen(
                [sys.executable, "-m", "multinode", *arguments.split()],
                cwd=tmp_path,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for verb, arguments in VERBS.items()
        }
        ended = {}
        try:
            for verb, process in started.items():
                left_s = max(1.0, HANGS_S - (time.monotonic() - begun))
                said = process.communicate(timeout=left_s)[0]
                ended[verb] = (process.returncode, said)
        finally:
            for process in started.values():
                process.kill()
                process.communicate()
    # What was not fetched does not hide how the run ended.
    run_end, not_fetched = ended["attach --fetch"][1].splitlines()[-2:]
    assert RUNNING[1] in run_end
    assert not_fetched.startswith(("box: nothing was fetched: contact with it was lost", "box: no SSH connection to"))
    for verb, (code, said) in ended.items():
        assert code not in {0, 2}, (verb, said)
        assert "Traceback" not in said, (verb, said)
        assert "box" in said, (verb, said)
        assert any(word in said for word in ("in time", "timed out", "within", "lost")), (verb, said)


def store(runs: Path, hostfile: str) -> None:
    """Runs that go on on both nodes, and one that was measured."""
    for run_id in RUNNING:
        directory = RunDirectory.create(runs, run_id)
        running = Run(
            run_id=run_id,
            job="train.py",
            engine="torchrun",
            status="running",
            started_s=1.0,
            world_size=4,
            nodes=(),
            lease_s=1.0,
        )
        directory.write_cluster(Cluster(nodes=(), source="hosts"), hostfile)
        directory.write("plan.json", make_plan("box", "jump"))
        directory.write("run.json", running)
    keep(runs, MEASURED, 2, 800)

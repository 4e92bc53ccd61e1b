"""A node whose sshd falls silent at a step of the protocol: every verb ends with a clear error that names the node."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.records.run_directory import RunDirectory
from tests import make
from tests.predict.test_recommendations import JOB, keep
from tests.transport.silent_sshd import silent_sshd

# Each verb's own: twice what its deadlines add up to. What waits without one reaches it.
HANGS_S = 240.0
STEPS = ["accept", "banner", "key exchange", "auth", "channel", "exec", "output", "input"]
EACH_COMMIT = {"output"}
RUNNING = ("20260101-000000-aaaa", "20260101-000000-aaab", "20260101-000000-aaac", "20260101-000000-aaad")
MEASURED = "20260101-000000-bbbb"
VERBS = {
    "init": "init box --output new.hosts",
    "check": "check --hosts hosts",
    "copy": "copy --hosts hosts job.yaml",
    "launch": "launch --hosts hosts -- train.py",
    "launch --no-check": "launch --no-check --hosts hosts -- train.py",
    "launch --detach": "launch --detach --hosts hosts -- train.py",
    "launch --fetch": "launch --fetch out --no-check --hosts hosts -- train.py",
    "nccl-test": "nccl-test --hosts hosts",
    "nccl-test --pairs": "nccl-test --pairs --hosts hosts",
    "bench": "bench --hosts hosts",
    "contrast": "contrast --hosts hosts -- train.py",
    "sweep": "sweep --hosts hosts job.yaml --grid per_device_train_batch_size=1,2",
    "tune --judge speed": f"tune --judge speed --from {MEASURED} --hosts hosts job.yaml",
    "attach": f"attach {RUNNING[0]}",
    "attach --fetch": f"attach {RUNNING[1]} --fetch out",
    "attach --hosts": "attach --hosts hosts 20260101-000000-cccc",
    "logs -f": f"logs -f {RUNNING[3]}",
    "stop": f"stop {RUNNING[2]}",
    "stop --hosts": "stop --hosts hosts 20260101-000000-cccc",
    "clean": "clean --hosts hosts",
}


@pytest.mark.long
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
        with ThreadPoolExecutor(len(VERBS)) as pool:
            ended = dict(zip(VERBS, pool.map(lambda verb: run(verb, tmp_path, environ), VERBS), strict=True))
    assert [verb for verb, (code, _) in ended.items() if code is None] == [], "these wait without a deadline"
    # What was not fetched does not hide how the run ended.
    run_end, not_fetched = ended["attach --fetch"][1].splitlines()[-2:]
    assert run_end.startswith("Next        multinode logs ")
    assert not_fetched.startswith(("box: nothing was fetched: contact was lost", "box: no SSH connection to"))
    for verb, (code, printed) in ended.items():
        # Lines are broken at any word.
        said = " ".join(printed.split())
        assert code not in {0, 2}, (verb, said)
        assert "Traceback" not in printed, (verb, said)
        assert "box" in said or "jump" in said, (verb, said)
        assert any(word in said for word in ("in time", "timed out", "within", "lost")), (verb, said)


def run(verb: str, cwd: Path, environ: dict[str, str]) -> tuple[int | None, str]:
    """Its exit code and all that it said; no code where it had not ended by its deadline."""
    command = [sys.executable, "-m", "multinode", *VERBS[verb].split()]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = process.communicate(timeout=HANGS_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return None, process.communicate()[0]
        return process.returncode, said


def store(runs: Path, hostfile: str) -> None:
    """Runs that go on on both nodes, and one that was measured."""
    for run_id in RUNNING:
        directory = RunDirectory.create(runs, run_id)
        running = make.run("box", "jump", run_id=run_id, status="running", world_size=4, lease_s=1.0)
        directory.write_cluster(parse_hostfile(hostfile, "hosts"), hostfile)
        directory.write("plan.json", make.plan("box", "jump", workers=2))
        directory.write("run.json", running)
    keep(runs, MEASURED, 2, 800)

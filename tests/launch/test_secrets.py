"""What a user keeps secret, through a whole launch on this very machine: the job has it, and no file that is left."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.cluster import local_cluster
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, JobEnvironment, ScriptJob, parse_training
from multinode.launch.context import ExecuteOptions, Launch, RunContext
from multinode.launch.launch import launch
from multinode.transport.local import LocalTransport

SECRET = "s3cr3t-0f-this-test"
# Tells what it was given by its digest, and which files of the run hold it while the run goes on.
TELL = f"""#!{sys.executable}
import hashlib, os, pathlib, re, sys
given = [open(word).read() if word.endswith(".yaml") else word for word in sys.argv[1:]]
for text in (*given, *given, os.environ.get("HF_TOKEN", ""), os.environ.get("WANDB_API_KEY", "")):
    for found in re.findall("s3cr3t[-a-z0-9]*", text):
        print("given", hashlib.sha256(found.encode()).hexdigest())
for path in pathlib.Path(os.environ["MULTINODE_RUN_DIR"]).rglob("*"):
    if path.is_file() and not path.is_symlink() and b"s3cr3t-" in path.read_bytes():
        print("left in", path)
"""
YAML = (
    f"model_name_or_path: m\nstage: sft\nhub_token: >-\n  {SECRET}\nswanlab_api_key: {SECRET}\n# hf_token: {SECRET}\n"
)
ARGUMENTS = (
    "--hf-token",
    SECRET,
    f"--hub_token={SECRET}",
    f"+wandb.api_key={SECRET}",
    f"export HF_TOKEN='{SECRET}'; :",
)


@pytest.mark.parametrize(
    ("job", "engine", "prelude", "given"),
    [
        (parse_training(YAML, "sft.yaml"), "llamafactory", None, 8),
        (parse_training(YAML, "sft.yaml", ["max_steps=3"]), "llamafactory", None, 6),
        (ScriptJob(argv=("tell", *ARGUMENTS)), "exec", None, 10),
        (ScriptJob(argv=("tell",)), "exec", f"export HF_TOKEN={SECRET}", 2),
    ],
    ids=["yaml", "rewritten yaml", "arguments", "prelude"],
)
def test_the_job_has_it_and_no_file_on_controller_or_node(
    tmp_path: Path, job: Job, engine: str, prelude: str | None, given: int
) -> None:
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    for name in ("llamafactory-cli", "tell"):
        (programs / name).write_text(TELL)
        (programs / name).chmod(0o755)
    cluster = local_cluster(1, str(programs / "python3"))
    env = {"HF_TOKEN": "first" if prelude else SECRET}
    cluster = msgspec.structs.replace(
        cluster, nodes=tuple(msgspec.structs.replace(node, env={"WANDB_API_KEY": SECRET}) for node in cluster.nodes)
    )
    what = Launch(
        cluster=cluster,
        hostfile=f"localhost slots=1 env.WANDB_API_KEY={SECRET} 'env.HF_TOKEN=a {SECRET}' # env.OLD_TOKEN={SECRET}\n",
        job=job,
        engine=Engine(name=engine),
        environment=JobEnvironment(env={} if prelude else env, prelude=prelude),
        execute=ExecuteOptions(grace_s=2.0, lease_s=30.0),
        check=False,
    )
    context = RunContext(LocalTransport(home), tmp_path / "runs")
    try:
        launched = launch(what, context)
    finally:
        context.agent.close()
    assert launched.run.status == "succeeded", launched.run.first_failure
    log = launched.directory.log_path(0).read_text().splitlines()
    assert log == [f"given {sha256(SECRET.encode()).hexdigest()}"] * given
    kept = [path for root in (tmp_path / "runs", home) for path in root.rglob("*") if path.is_file()]
    assert {"hostfile.txt", "cluster.json", "plan.json", "request.json"} <= {path.name for path in kept}
    assert [path for path in kept if b"s3cr3t" in path.read_bytes()] == []

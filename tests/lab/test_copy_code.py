"""`launch --copy-code` on the lab: what is sent of a thousand files, and what the job finds in its copy."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.launching import Command, assert_succeeded
from tests.lab.supervised import GoFile

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("module_lab")]

JOB = """
import json, os, sys
names = [os.path.relpath(os.path.join(at, name)) for at, _, names in os.walk(".") for name in names]
told = {
    "files": sorted(name for name in names if not name.startswith("many/")),
    "many": sum(name.startswith("many/") for name in names),
    "value": open("many/500.py").read(),
    "executable": [name for name in names if os.access(name, os.X_OK)],
    "link": os.readlink("link"),
    "cwd": os.getcwd(),
}
print(json.dumps(told), flush=True)
if len(sys.argv) > 1:
    open(sys.argv[1], "w").write("of the job")
"""
WAITS = """
import pathlib, sys, time
print("begun", flush=True)
while not pathlib.Path(sys.argv[1]).read_text():
    time.sleep(0.1)
print(pathlib.Path("job.py").exists(), flush=True)
"""
LAUNCH = ("launch", "--hosts", "lab", "--json", "--no-check", "--engine", "exec", "--copy-code")
OTHERS = [".gitignore", "job.py", "link", "run.sh", "two\nlines"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A thousand files, and some of the kinds that are easily lost; the nodes do not see this directory."""
    folder = tmp_path / "project"
    (folder / "many").mkdir(parents=True)
    for number in range(1000):
        (folder / "many" / f"{number}.py").write_text(f"value = {number}\n")
    (folder / "job.py").write_text(JOB)
    (folder / "two\nlines").write_text("x")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("many/500.py")
    (folder / ".gitignore").write_text("secret.txt\n")
    (folder / "secret.txt").write_text("s3cret")
    (folder / ".env").write_text("TOKEN=s3cret")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def launch(command: Command, project: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document of a launch, and what the job found on each node."""
    document = command.document(*LAUNCH, str(project), "--", "python3", "job.py", *arguments)
    assert_succeeded(document)
    logs = command.document("logs", document["run_id"], "--json")["nodes"]
    return document, [json.loads(node["log"].strip().splitlines()[-1]) for node in logs]


def test_after_an_edit_of_one_of_a_thousand_files_that_one_is_sent(
    command: Command, project: Path, shell: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for node in ("node0", "node1"):
        shell(node, "rm -rf .multinode/code")
    first, found = launch(command, project)
    assert {name: sent["files"] for name, sent in first["code"]["sent"].items()} == {"node0": 1004, "node1": 1004}
    assert first["code"]["files"] == 1005
    place = f".multinode/code/{first['run_id']}/tree"
    for told in found:
        assert (told["files"], told["many"], told["value"]) == (OTHERS, 1000, "value = 500\n")
        assert (told["executable"], told["link"]) == (["run.sh"], "many/500.py")
        assert told["cwd"].endswith(place)
    (project / "many" / "500.py").write_text("value = -1\n")
    second, found = launch(command, project, "checkpoint")
    edited = {"files": 1, "size_bytes": len("value = -1\n")}
    assert second["code"]["sent"] == {"node0": edited, "node1": edited}
    assert second["code"]["digest"] != first["code"]["digest"]
    assert [told["value"] for told in found] == ["value = -1\n"] * 2
    plan = json.loads((command.runs / second["run_id"] / "plan.json").read_text())
    assert (plan["code"]["digest"], plan["code"]["files"]) == (second["code"]["digest"], 1005)

    cleaned = command.document("clean", "--hosts", "lab", first["run_id"], second["run_id"], "--json")
    written = f"/root/.multinode/code/{second['run_id']}/tree"
    assert [node["code_kept"] for node in cleaned["nodes"]] == [[written]] * 2
    for node in ("node0", "node1"):
        listed = shell(node, f"ls .multinode/code; cat {written}/checkpoint").stdout
        assert listed.splitlines() == [second["run_id"], "of the job"]


def test_a_detached_run_goes_on_in_its_copy_after_an_edit(command: Command, project: Path, go_file: GoFile) -> None:
    (project / "waits.py").write_text(WAITS)
    job = ("--detach", "--", "python3", "waits.py", str(go_file.path))
    run_id = command.document(*LAUNCH, str(project), *job)["run_id"]
    (project / "job.py").unlink()
    go_file.end()
    document = command.document("attach", run_id, "--json")
    assert_succeeded(document)
    logs = command.document("logs", run_id, "--json")["nodes"]
    assert [node["log"].split() for node in logs] == [["begun", "True"]] * 2


# Each commit sees what its paths become in the golden plan (tests/job), and a copy in use above.
@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.usefixtures("tiny")
def test_llamafactory_reads_its_copy_and_writes_outside_of_it(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree("assets/tiny", folder / "own")
    shutil.copy("configs/tiny_sft.yaml", folder / "job.yaml")
    settings = ("model_name_or_path=own/model", "dataset_dir=own/data", "max_steps=4")
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ("--hosts", "lab", "--json", "--no-check", "--workers-per-node", "1", "--env", "OMP_NUM_THREADS=1")
    document = command.document("launch", *arguments, "--copy-code", str(folder), str(folder / "job.yaml"), *options)
    assert_succeeded(document)
    assert document["summary"]["steps"] == 4
    cleaned = command.document("clean", "--hosts", "lab", document["run_id"], "--json")
    assert [(node["code_kept"], len(node["removed"])) for node in cleaned["nodes"]] == [([], 1)] * 2

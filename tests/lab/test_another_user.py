"""What another user of this machine wrote: run directories, settings and hostfiles have no programs run as us."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import Golden

pytestmark = pytest.mark.lab

RUN = "20260102-030405-abcd"
STRANGER, ANOTHER = 65534, 5
# As the other user: a run directory that looks like one of a launch, whose hostfile names an SSH configuration.
MAKE_RUN = """
import pathlib, sys
from multinode.cluster.hostfile import parse_hostfile
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
root, folder = map(pathlib.Path, sys.argv[1:3])
node = NodeRun(name="gpu-a", node_rank=0)
run = Run(run_id=sys.argv[3], job="j", engine="torchrun", status="running", started_s=1.5, world_size=1, nodes=(node,))
directory = RunDirectory.create(root, run.run_id)
directory.write("run.json", run)
directory.write("plan.json", {"run_id": run.run_id})
hostfile = f"gpu-a ssh_config={folder}/evil_ssh\\n"
directory.write_cluster(parse_hostfile(hostfile, "hosts"), hostfile)
for path in (directory.path, *directory.path.rglob("*")):
    path.chmod(0o755)
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which everyone may write, with an SSH configuration of a stranger's that leaves a mark."""
    path = tmp_path_factory.mktemp("shared")
    for parent in [path, *path.parents]:
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o055 != 0o055 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    path.chmod(0o1777)
    (path / "evil_ssh").write_text(f'Match exec "touch {path}/mark-$(id -u)"\n')
    (path / "evil_ssh").chmod(0o644)
    os.chown(path / "evil_ssh", STRANGER, STRANGER)
    return path


def python(uid: int, *words: str, cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As that user, who can read the interpreter wherever it lies."""
    dropped = [] if uid == 0 else [
        "setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups",
        "--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search",
    ]  # fmt: skip
    return subprocess.run(
        [*dropped, sys.executable, *words],
        cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def command(folder: Path, *words: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder / f"home-{uid}")}
    return python(uid, "-m", "multinode", *words, cwd=folder, environ=environ)


def mine(uid: int) -> dict[str, str]:
    """What differs between users in a hint."""
    return {f"chown -R {pwd.getpwuid(uid).pw_name}": "chown -R ME"}


def warnings(done: subprocess.CompletedProcess[str]) -> str:
    """What follows depends on whether a lab is up."""
    return "".join(line for line in done.stderr.splitlines(keepends=True) if line.startswith("warning: "))


def marks(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("mark-*")]


@pytest.mark.parametrize("uid", [0, ANOTHER], ids=["root", "a user"])
def test_a_run_directory_of_another_user_is_not_ours(folder: Path, uid: int, golden: Golden) -> None:
    (folder / "runs").mkdir()
    (folder / "runs").chmod(0o1777)
    made = python(
        STRANGER, "-c", MAKE_RUN, str(folder / "runs"), str(folder), RUN, cwd=Path(__file__).parents[2], environ={}
    )
    assert made.returncode == 0, made.stderr
    told = {}
    for line in ("attach last", f"attach {RUN}", "stop last", "show last", f"logs {RUN}"):
        ended = command(folder, *line.split(), uid=uid)
        assert ended.returncode == 2
        told[line] = ended.stderr
    listed = command(folder, "runs", uid=uid)
    told["runs"] = listed.stderr + listed.stdout
    golden.check_texts("run_of_another", told, folder, mine(uid))
    assert marks(folder) == []


@pytest.mark.parametrize("uid", [0, ANOTHER], ids=["root", "a user"])
def test_settings_and_a_default_job_of_another_user_are_noted_and_ignored(
    folder: Path, uid: int, golden: Golden
) -> None:
    (folder / "hosts.txt").write_text(f"gpu-a ssh_config={folder}/evil_ssh\n")
    (folder / "multinode.toml").write_text('[defaults]\nhosts = "hosts.txt"\nsetup = "touch mark-setup"\n')
    (folder / "configs").mkdir()
    (folder / "configs/default.yaml").write_text("stage: sft\n")
    for path in (folder / "hosts.txt", folder / "multinode.toml", folder / "configs/default.yaml"):
        os.chown(path, STRANGER, STRANGER)
    checked = command(folder, "check", uid=uid)
    (folder / "mine.txt").write_text("gpu-a addr=192.0.2.1\n")
    launched = command(folder, "launch", "--hosts", "mine.txt", "--dry-run", uid=uid)
    assert "hostfile: hosts.txt" not in checked.stderr
    assert "gpu-a" not in checked.stdout + checked.stderr
    told = {"check": warnings(checked), "launch": launched.stderr + launched.stdout}
    golden.check_texts("settings_of_another", told, folder, mine(uid))
    assert marks(folder) == []


@pytest.mark.parametrize(("named", "uid"), [("ssh_config", 0), ("python", ANOTHER), ("env.LD_PRELOAD", 0)])
def test_a_hostfile_of_another_user_is_read_but_for_what_runs_programs(
    folder: Path, named: str, uid: int, golden: Golden
) -> None:
    (folder / "hosts.txt").write_text(f"gpu-a addr=192.0.2.1 {named}={folder}/evil_ssh\n")
    os.chown(folder / "hosts.txt", STRANGER, STRANGER)
    checked = command(folder, "check", "--hosts", "hosts.txt", uid=uid)
    assert checked.returncode == 2
    golden.check_texts("hostfile_of_another", {"check": checked.stderr}, folder, {f"{named}=": "KEY="})
    assert marks(folder) == []
    (folder / "hosts.txt").write_text("gpu-a slots=none env.WANDB_MODE=offline\n")
    wrong = command(folder, "check", "--hosts", "hosts.txt", uid=uid)
    golden.check("hostfile_of_another_is_read.txt", wrong.stderr)


def test_what_a_link_of_another_user_leads_to_is_not_chosen_by_us(folder: Path, golden: Golden) -> None:
    ours = folder / "ours.toml"
    ours.write_text('[defaults]\nhosts = "hosts.txt"\n')
    (folder / "multinode.toml").symlink_to(ours)
    os.chown(folder / "multinode.toml", STRANGER, STRANGER, follow_symlinks=False)
    golden.check_texts("link_of_another", {"check": warnings(command(folder, "check"))}, folder)


def test_what_the_user_of_sudo_wrote_counts_as_ours(folder: Path, golden: Golden) -> None:
    (folder / "multinode.toml").write_text('[defaults]\nhosts = "absent.txt"\n')
    os.chown(folder / "multinode.toml", ANOTHER, ANOTHER)
    environ = {"PATH": os.environ["PATH"], "SUDO_UID": str(ANOTHER)}
    ended = python(0, "-m", "multinode", "check", cwd=folder, environ=environ)
    golden.check_texts("settings_of_sudo", {"check": ended.stderr}, folder)

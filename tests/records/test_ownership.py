from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from multinode.node.files import describe_stranger
from multinode.records.hostfile import load_hostfile
from multinode.records.run_directory import RunDirectory, list_runs, scan_runs
from multinode.records.settings import Settings, load_settings
from tests import make
from tests.golden import Golden, error_of

RUN = make.run(status="running", started_s=1.5, world_size=2)
OWNER = pwd.getpwuid(os.getuid()).pw_name
OLDER, NEWER = "20260102-030405-abcd", "20260102-030406-abcd"


def test_what_we_alone_may_write_has_no_stranger(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    assert describe_stranger(path) is None
    assert describe_stranger(Path("/etc/passwd")) is None


def test_what_the_world_may_write_has_one_and_its_mode_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o646)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert describe_stranger(path) == f"is writable by others: owned by user {user}, mode 0646"
    (tmp_path / "link").symlink_to(path)
    assert describe_stranger(tmp_path / "link") == describe_stranger(path)


def test_a_group_may_write_where_it_is_its_users_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    group, user = grp.getgrgid(os.getgid()), pwd.getpwuid(os.getuid())
    private = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    assert (describe_stranger(path) is None) == private


def test_a_world_writable_run_is_ignored_and_named_with_the_fix(tmp_path: Path, golden: Golden) -> None:
    for name in (OLDER, NEWER):
        make.store(tmp_path, name, run=RUN)
    (tmp_path / NEWER).chmod(0o777)
    assert list_runs(tmp_path) == [tmp_path / OLDER]
    assert RunDirectory.open(tmp_path, "last").run_id == OLDER
    golden.check_errors("writable_run", {NEWER: error_of(RunDirectory.open, tmp_path, NEWER)}, tmp_path, {OWNER: "ME"})


def test_the_last_run_is_told_to_be_another_than_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (OLDER, NEWER):
        make.store(tmp_path, name, run=RUN)
    (tmp_path / OLDER).chmod(0o777)
    RunDirectory.open(tmp_path, "last")
    assert caplog.messages == []
    (tmp_path / OLDER).chmod(0o700)
    (tmp_path / NEWER).chmod(0o777)
    RunDirectory.open(tmp_path, "last")
    assert [NEWER in message for message in caplog.messages] == [True]


def test_world_writable_settings_are_ignored_once_a_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "multinode.toml"
    path.write_text('[defaults]\nsetup = "rm -r ."\n')
    path.chmod(0o666)
    assert [load_settings(tmp_path), load_settings(tmp_path)] == [Settings(), Settings()]
    assert len(caplog.messages) == 1
    path.chmod(0o644)
    assert load_settings(tmp_path).defaults.setup == "rm -r ."


def test_a_world_writable_hostfile_runs_no_programs(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("a\nb python=/opt/python\n")
    assert load_hostfile(path)[0].nodes[1].python == "/opt/python"
    path.chmod(0o666)
    golden.check_errors("writable_hostfile", {"python=": error_of(load_hostfile, path)}, tmp_path, {OWNER: "ME"})
    path.write_text("a env.NCCL_DEBUG=INFO workdir=/data\n")
    assert load_hostfile(path)[0].nodes[0].workdir == "/data"


def test_a_linked_root_of_runs_is_followed(tmp_path: Path) -> None:
    make.store(tmp_path / "disk", OLDER, run=RUN)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert [path.name for path in scan_runs(tmp_path / "runs").ours] == [OLDER]

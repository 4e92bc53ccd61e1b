from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from multinode.lab.cluster import ns_command, refresh
from multinode.lab.state import Lab

pytestmark = pytest.mark.lab

Command = Callable[..., CompletedProcess[str]]


def test_what_a_node_writes_stays_there(small: Lab, shell: Command, shared_dir: Path) -> None:
    del small
    (shared_dir / "given").write_text("controller\n")
    assert shell("node0", f"cd {shared_dir}; cat given; echo node0 > given; echo x > new").stdout == "controller\n"
    assert shell("node0", f"cat {shared_dir}/given").stdout == "node0\n"
    assert shell("node1", f"cat {shared_dir}/given; ls {shared_dir}").stdout == "controller\ngiven\n"
    assert (shared_dir / "given").read_text() == "controller\n"
    assert not (shared_dir / "new").exists()


def test_places_that_every_machine_has_for_itself(small: Lab, shell: Command) -> None:
    del small
    paths = [f"{place}/multinode-test" for place in ("/tmp", "/run", "/dev/shm", "/root/.ssh", "/dev")]
    names = " ".join(paths)
    assert shell("node0", f"touch {names} && ls {names}").stdout.split() == sorted(paths)
    assert shell("node1", f"ls {names}").stdout == ""
    assert not [path for path in paths if Path(path).exists()]
    assert shell("node0", f"rm {names}").returncode == 0


def test_a_file_that_was_missed_is_seen_by_the_next_session(
    small: Lab, ssh: Command, multinode: Command, shared_dir: Path
) -> None:
    del small
    for number, look in enumerate((lambda path: ssh("node0", f"cat {path}"), _exec_cat(multinode))):
        path = shared_dir / f"late{number}"
        assert look(path).returncode != 0
        path.write_text("there\n")
        assert look(path).stdout == "there\n"


def test_a_file_that_was_replaced_is_seen_anew(small: Lab, shell: Command, shared_dir: Path) -> None:
    del small
    path = shared_dir / "job.yaml"
    path.write_text("old\n")
    assert shell("node0", f"cat {path}").stdout == "old\n"
    (shared_dir / "draft").write_text("new\n")
    (shared_dir / "draft").rename(path)
    assert shell("node0", f"cat {path}").stdout == "new\n"
    path.unlink()
    assert shell("node0", f"test -e {path}").returncode == 1


def test_refresh_shows_new_files_to_what_runs_already(small: Lab, shared_dir: Path) -> None:
    path = shared_dir / "late"
    # A bare entry into the namespaces, which refreshes nothing by itself.
    look = [*ns_command(small.nodes[1]), "cat", str(path)]
    assert subprocess.run(look, capture_output=True, check=False).returncode != 0
    path.write_text("there\n")
    refresh(small)
    seen = subprocess.run(look, capture_output=True, check=False)
    assert (seen.stdout, seen.stderr) == (b"there\n", b"")


def test_a_full_disk_is_the_nodes_own_trouble(small: Lab, shell: Command, shared_dir: Path) -> None:
    del small
    try:
        full = shell("node0", f"head -c 300M /dev/zero > {shared_dir}/big")
        assert "No space left on device" in full.stderr
        assert "No space left on device" in shell("node0", "echo x > /tmp/small").stderr
        assert shell("node1", "echo x > /tmp/small && rm /tmp/small").returncode == 0
        assert not (shared_dir / "big").exists()
        (shared_dir / "small").write_text("x")
    finally:
        shell("node0", f"rm -f {shared_dir}/big /tmp/small")
    assert shell("node0", "echo x > /tmp/small && rm /tmp/small").returncode == 0


def _exec_cat(multinode: Command) -> Callable[[Path], CompletedProcess[str]]:
    return lambda path: multinode("lab", "exec", "node0", "--", "cat", str(path))

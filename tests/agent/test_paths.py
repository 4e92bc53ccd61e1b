from __future__ import annotations

import os
from pathlib import Path

import pytest

from multinode.agent.facts.paths import Mount, find_mount, look_at, parse_mounts, read_mounts

# /proc/self/mountinfo of a virtual machine with Debian 12; then lines as NFS, a path with a blank, and rootless podman
# show there.
CAPTURED = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24683656k
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,resv_strict,resuid=65534,resgid=65534
41 27 0:44 / /home rw,relatime shared:23 - autofs systemd-1 rw,fd=50,pgrp=1,timeout=0,minproto=5,maxproto=5,direct
83 41 0:45 / /home rw,relatime shared:46 master:2 - nfs4 store:/export/home rw,vers=4.2,rsize=1048576
84 27 0:46 / /mnt/my\\040data rw - nfs store:/my\\040data rw
85 27 0:50 / /srv rw,nodev - fuse.fuse-overlayfs fuse-overlayfs rw,user_id=0
"""


def test_mounts_are_read_with_their_blanks() -> None:
    mounts = parse_mounts(CAPTURED)
    assert len(mounts) == 7
    assert mounts[5] == Mount("/mnt/my data", "nfs", "store:/my data")
    assert parse_mounts("27 1 254:0 / / rw\n\n - \ncut off - ext4 /dev/vda\n") == []


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/", "ext4"),
        ("/homework/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/jane/data", "nfs4"),
        ("/dev/shm", "tmpfs"),
        ("/mnt/my data/x", "nfs"),
        ("/srv/x", "fuse.fuse-overlayfs"),
    ],
)
def test_a_path_lies_on_the_deepest_file_system_and_the_last_that_was_put_there(path: str, filesystem: str) -> None:
    found = find_mount(path, parse_mounts(CAPTURED))
    assert found is not None
    assert found.filesystem == filesystem


def test_what_is_missing_lies_where_its_path_begins_to_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mounts = [Mount("/", "ext4", "/dev/vda"), Mount(os.path.realpath(tmp_path), "nfs", "store:/x")]
    assert look_at("out/new", str(tmp_path), mounts) == {
        "path": "out/new",
        "kind": "missing",
        "writable": True,
        "filesystem": "nfs",
        "device": "store:/x",
    }
    assert look_at("/nowhere", str(tmp_path), mounts)["filesystem"] == "ext4"
    assert look_at("x", str(tmp_path), [])["filesystem"] is None
    below = look_at("file/below", str(tmp_path), mounts)
    assert (below["kind"], below["writable"]) == ("missing", False)


def test_this_machine_tells_its_file_systems() -> None:
    assert find_mount("/proc/self", read_mounts()) == Mount("/proc", "proc", "proc")

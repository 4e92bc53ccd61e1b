from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from multinode.agent.machine import find_container, find_memory_limit, read_machine

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> str:
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_every_fact_is_there_or_has_a_reason() -> None:
    facts, missing = read_machine()
    assert {name for name, value in facts.items() if value is None} == set(missing)
    assert all(missing.values())
    assert facts["memory_total_gib"] > facts["memory_available_gib"] > 0
    shm = os.statvfs("/dev/shm")
    assert facts["shm_total_gib"] == pytest.approx(shm.f_blocks * shm.f_frsize / GIB)
    assert 0 <= facts["shm_free_gib"] <= facts["shm_total_gib"]


def test_limits_are_soft_limits_and_none_is_unlimited() -> None:
    limits = read_machine()[0]["limits"]
    assert limits["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert set(limits) == {"open_files", "processes", "locked_memory_bytes"}
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert limits["locked_memory_bytes"] == (None if locked == resource.RLIM_INFINITY else locked)


# /proc/self/cgroup as docker on Ubuntu 22.04 shows it (version 2, a namespace of its own), as systemd shows a login on
# version 2, and as docker on Ubuntu 18.04 shows it (version 1).
@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "17179869184\n"}, 16 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
                "sys/fs/cgroup/user.slice/user-1000.slice/session-3.scope/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/user-1000.slice/memory.max": "34359738368\n",
            },
            32 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/docker/3f4e\n8:memory:/docker/3f4e\n4:cpu,cpuacct:/docker/3f4e\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8589934592\n",
            },
            8 * GIB,
        ),
        ({"proc/self/cgroup": "8:memory:/\n0::/\n"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_the_groups_above_counts_in_both_versions(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    assert find_memory_limit(tree(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"run/systemd/container": "lxc\n"}, "lxc"),
        ({"proc/1/environ": "PATH=/bin\0container=systemd-nspawn\0"}, "systemd-nspawn"),
        ({"proc/1/cgroup": "8:memory:/docker/3f4e\n"}, "docker"),
        ({"proc/1/cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-2.scope\n"}, "kubernetes"),
        ({".dockerenv": "", "proc/1/environ": "KUBERNETES_SERVICE_HOST=10.96.0.1\0"}, "kubernetes"),
    ],
)
def test_a_container_is_known_by_what_its_maker_leaves(tmp_path: Path, files: dict[str, str], kind: str) -> None:
    assert find_container({}, tree(tmp_path, files)) == kind


def test_a_machine_is_no_container(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/1/cgroup": "0::/init.scope\n", "proc/1/environ": "HOME=/\0"})
    with pytest.raises(LookupError, match="no sign"):
        find_container({}, root)

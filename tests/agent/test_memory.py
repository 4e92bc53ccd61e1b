from __future__ import annotations

from pathlib import Path

import pytest

from multinode.agent.facts.cgroups import Hierarchy, find_hierarchy, group_of
from multinode.agent.facts.memory import GroupMemory, Memory, MemoryReader, limited_groups, read_meminfo, usable_memory

from .own_group import own_group

GIB = 1 << 30
MACHINE = Memory(total=64 * GIB, available=50 * GIB)
# In the kernel's form (admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst), shortened.
STAT = "anon 6442450944\nfile 3221225472\ninactive_file 2147483648\nactive_file 1073741824\nslab_reclaimable 4096\n"
STAT_1 = "rss 7\ninactive_file 1\nactive_file 1\ntotal_inactive_file 2147483648\ntotal_active_file 1073741824\n"
# What version 1 writes for no limit.
UNLIMITED_1 = str((1 << 63) - 4096)


def tree(place: Path, files: dict[str, str], *, unified: bool = True) -> Hierarchy:
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Hierarchy(controller="memory", unified=unified, root="/", place=str(place))


def found(hierarchy: Hierarchy, below: str = "") -> list[GroupMemory]:
    return list(limited_groups(hierarchy, str(Path(hierarchy.place, below))))


@pytest.mark.parametrize(
    ("groups", "usable"),
    [
        ([], MACHINE),
        ([GroupMemory(limit=16 * GIB, held=6 * GIB)], Memory(16 * GIB, 10 * GIB)),
        # The machine has less left than the group may still take.
        ([GroupMemory(limit=60 * GIB, held=GIB)], Memory(60 * GIB, 50 * GIB)),
        ([GroupMemory(limit=80 * GIB, held=GIB)], MACHINE),
        # The group around has the higher limit, and less of it left, as others are in it.
        ([GroupMemory(16 * GIB, GIB), GroupMemory(32 * GIB, 30 * GIB)], Memory(16 * GIB, 2 * GIB)),
        ([GroupMemory(16 * GIB, None)], Memory(16 * GIB, 16 * GIB)),
        # Over its limit, as for a moment after that was lowered.
        ([GroupMemory(16 * GIB, 17 * GIB)], Memory(16 * GIB, 0)),
    ],
)
def test_whoever_has_least_decides_what_there_is_and_what_is_left(groups: list[GroupMemory], usable: Memory) -> None:
    assert usable_memory(MACHINE, groups) == usable


def test_what_the_kernel_takes_back_is_not_held_in_version_2(tmp_path: Path) -> None:
    files = {"memory.max": f"{16 * GIB}\n", "memory.current": f"{9 * GIB}\n", "memory.stat": STAT}
    assert found(tree(tmp_path, files)) == [GroupMemory(limit=16 * GIB, held=6 * GIB - 4096)]


def test_what_the_kernel_takes_back_is_not_held_in_version_1(tmp_path: Path) -> None:
    files = {
        "job/memory.limit_in_bytes": f"{16 * GIB}\n",
        "job/memory.usage_in_bytes": f"{9 * GIB}\n",
        "job/memory.stat": STAT_1,
        "memory.limit_in_bytes": f"{UNLIMITED_1}\n",
    }
    job, top = found(tree(tmp_path, files, unified=False), "job")
    assert job == GroupMemory(limit=16 * GIB, held=6 * GIB)
    assert usable_memory(MACHINE, [top]) == MACHINE


def test_the_lowest_limit_of_all_groups_around_counts_and_not_the_nearest(tmp_path: Path) -> None:
    files = {
        "user.slice/user-1000.slice/session-3.scope/memory.max": f"{32 * GIB}\n",
        "user.slice/user-1000.slice/memory.max": "max\n",
        "user.slice/memory.max": f"{8 * GIB}\n",
    }
    groups = found(tree(tmp_path, files), "user.slice/user-1000.slice/session-3.scope")
    assert [group.limit for group in groups] == [32 * GIB, 8 * GIB]
    assert usable_memory(MACHINE, groups).total == 8 * GIB


# As docker on Ubuntu 22.04 shows it (version 2, a namespace of its own), docker on Ubuntu 18.04 (version 1), and
# machines without limits.
@pytest.mark.parametrize(
    ("mount", "membership", "files", "total"),
    [
        ("/ {} ro - cgroup2 cgroup rw", "0::/\n", {"memory.max": f"{16 * GIB}\n"}, 16 * GIB),
        (
            "/docker/3f4e {} ro - cgroup cgroup rw,memory",
            "9:name=systemd:/docker/3f4e\n8:memory:/docker/3f4e\n4:cpu,cpuacct:/docker/3f4e\n",
            {"memory.limit_in_bytes": f"{8 * GIB}\n"},
            8 * GIB,
        ),
        ("/ {} rw - cgroup2 cgroup2 rw", "0::/init.scope\n", {"init.scope/memory.max": "max\n"}, 64 * GIB),
        ("/ {} rw - cgroup2 cgroup2 rw", "0::/gone\n", {}, 64 * GIB),
    ],
)
def test_containers_of_both_versions_have_what_they_were_given(
    tmp_path: Path, mount: str, membership: str, files: dict[str, str], total: int
) -> None:
    place = tmp_path / "cgroup"
    tree(place, {"cgroup.procs": "", **files})
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"31 22 0:27 {mount.format(place)}\n")
    hierarchy = find_hierarchy("memory", str(mounts))
    assert hierarchy is not None
    group = group_of(hierarchy, membership)
    assert group is not None
    assert usable_memory(MACHINE, list(limited_groups(hierarchy, group))).total == total


def test_a_process_has_what_its_group_may_and_a_limit_that_is_told(tmp_path: Path) -> None:
    reader = MemoryReader(own_group(tmp_path, limit=str(GIB // 4), used=str(GIB // 8)))
    assert reader.read() == Memory(total=GIB // 4, available=GIB // 8)
    assert reader.limit() == GIB // 4


@pytest.mark.parametrize("limit", [None, "max", UNLIMITED_1, "?"])
def test_without_a_limit_below_it_the_machine_s_memory_is_all_there_is(tmp_path: Path, limit: str | None) -> None:
    reader = MemoryReader(own_group(tmp_path, limit))
    assert reader.read().total == read_meminfo().total
    assert reader.limit() is None


def test_where_no_groups_can_be_seen_the_machine_s_memory_is_all_there_is(tmp_path: Path) -> None:
    nothing = tmp_path / "mountinfo"
    for reader in (MemoryReader(str(nothing)), MemoryReader(str(tmp_path / "none"))):
        assert reader.read().total == read_meminfo().total
        assert reader.limit() is None
    nothing.write_text("")
    assert MemoryReader(str(nothing)).limit() is None


def test_a_machine_tells_its_memory_in_kib(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24683656 kB\nMemFree:         112 kB\nMemAvailable:   23339620 kB\n")
    assert read_meminfo(str(meminfo)) == Memory(24683656 << 10, 23339620 << 10)

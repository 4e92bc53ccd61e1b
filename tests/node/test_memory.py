from __future__ import annotations

from pathlib import Path

import pytest

from multinode.node.facts.cgroups import (
    ControlGroup,
    GroupMemory,
    Hierarchy,
    Memory,
    MemoryKills,
    MemoryReader,
    counter_of,
    find_hierarchy,
    limited_groups,
    read_counter,
    read_meminfo,
    usable_memory,
)

from .localnode import LocalNode
from .own_group import own_group

GIB = 1 << 30
MACHINE = Memory(total=64 * GIB, available=50 * GIB)
# In the kernel's form (admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst), shortened.
STAT = "anon 6442450944\nfile 3221225472\ninactive_file 2147483648\nactive_file 1073741824\nslab_reclaimable 4096\n"
STAT_1 = "rss 7\ninactive_file 1\nactive_file 1\ntotal_inactive_file 2147483648\ntotal_active_file 1073741824\n"
# What version 1 writes for no limit.
UNLIMITED_1 = str((1 << 63) - 4096)

ALL_KILLS = "/proc/vmstat"
# As Linux 6.18 writes them.
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
EVENTS = "low 0\nhigh 0\nmax 212\noom 7\noom_kill {}\noom_group_kill 0\nsock_throttled 0\n"


def tree(place: Path, files: dict[str, str], *, unified: bool = True) -> Hierarchy:
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Hierarchy("memory", unified, "/", str(place))


def found(hierarchy: Hierarchy, below: str = "") -> list[GroupMemory]:
    return list(limited_groups(ControlGroup(hierarchy, str(Path(hierarchy.place, below)))))


def told(path: Path, kills: int, text: str = EVENTS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(kills))
    return str(path)


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
    group = hierarchy.group_of(membership)
    assert group is not None
    assert usable_memory(MACHINE, list(limited_groups(group))).total == total


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


@pytest.mark.parametrize(("text", "kills"), [(OOM_CONTROL, 3), (EVENTS, 3), ("nr_free_pages 9\noom_kill {}\n", 3)])
def test_a_group_of_either_version_and_the_machine_tell_their_kills(tmp_path: Path, text: str, kills: int) -> None:
    assert read_counter(told(tmp_path / "file", kills, text)) == kills


def test_an_old_kernel_tells_none(tmp_path: Path) -> None:
    assert read_counter(told(tmp_path / "file", 0, "oom_kill_disable 0\nunder_oom 0\n")) is None
    assert read_counter(str(tmp_path / "nowhere")) is None
    kills = MemoryKills(lambda _pid: str(tmp_path / "nowhere"))
    kills.look()
    kills.look()
    assert kills.count is None


@pytest.mark.parametrize(
    ("file", "unified", "membership"),
    [
        # Version 1 is asked in the tree of memory.
        ("job/memory.oom_control", False, "5:memory:/job\n4:cpu:/other\n0::/\n"),
        # A group without the controller is answered for by the one around it.
        ("slice/memory.events", True, "0::/slice/scope/leaf\n"),
        # The root of a machine of version 2 has no such file.
        (None, True, "0::/\n"),
        (None, True, "0::/../elsewhere\n"),
    ],
)
def test_kills_are_counted_by_the_nearest_group_that_does_or_by_the_machine(
    tmp_path: Path, *, file: str | None, unified: bool, membership: str
) -> None:
    (tmp_path / "slice/scope/leaf").mkdir(parents=True)
    counter = ALL_KILLS if file is None else told(tmp_path / file, 1)
    assert counter_of(tree(tmp_path, {}, unified=unified).group_of(membership)) == counter


def test_only_kills_since_the_first_look_count(tmp_path: Path) -> None:
    file = tmp_path / "memory.events"
    told(file, 5)
    kills = MemoryKills(lambda _pid: str(file))
    kills.look()
    assert kills.count == 0
    told(file, 7)
    kills.look()
    assert kills.count == 2


def test_a_job_that_is_moved_takes_its_kills_along_and_finds_none_of_others(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    told(before, 1)
    told(after, 40)
    here = before

    def find(_pid: int | None) -> str:
        return str(here)

    kills = MemoryKills(find)
    kills.look()
    told(before, 2)
    here = after
    kills.watch(1)
    assert kills.count == 1
    told(after, 41)
    told(before, 9)
    kills.look()
    assert kills.count == 2
    after.unlink()
    kills.look()
    assert kills.count == 2


def test_this_machine_answers_for_us_and_for_a_process_that_is_gone() -> None:
    for pid in (None, 1 << 30):
        kills = MemoryKills()
        kills.look() if pid is None else kills.watch(pid)
        assert kills.count == 0


def test_a_run_that_was_not_starved_says_so(node: LocalNode) -> None:
    assert node.run(["true"]).records[-1]["oom_kills"] == 0

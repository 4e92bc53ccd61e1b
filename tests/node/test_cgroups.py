from __future__ import annotations

from pathlib import Path

import pytest

from multinode.node.facts.cgroups import ControlGroup, GroupFinder, Hierarchy, find_hierarchy, read_cpu_limit


def group(place: Path, **files: str) -> Path:
    """A control group with these files; `cpu_stat` is cpu.stat."""
    place.mkdir(parents=True, exist_ok=True)
    for name, text in {"cgroup_procs": "", **files}.items():
        (place / name.replace("_", ".", 1)).write_text(f"{text}\n")
    return place


def mountinfo(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "mountinfo"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_version_1_with_the_cpu_controller_comes_before_version_2(tmp_path: Path) -> None:
    for name in ("cpu,cpuacct", "unified", "memory"):
        group(tmp_path / name)
    mounts = mountinfo(
        tmp_path,
        "22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda rw",
        f"31 22 0:27 / {tmp_path}/unified rw shared:5 - cgroup2 cgroup2 rw,nsdelegate",
        f"32 22 0:28 / {tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"33 22 0:29 /docker/4f {tmp_path}/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
    )
    assert find_hierarchy("cpu", mounts) == Hierarchy(
        controller="cpu", unified=False, root="/docker/4f", place=f"{tmp_path}/cpu,cpuacct"
    )


def test_each_controller_of_version_1_has_a_tree_of_its_own_and_what_it_lacks_version_2_has(tmp_path: Path) -> None:
    for name in ("cpu", "memory", "unified"):
        group(tmp_path / name)
    lines = (
        f"31 22 0:27 / {tmp_path}/unified rw - cgroup2 cgroup2 rw",
        f"32 22 0:28 / {tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"33 22 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu",
    )
    found = find_hierarchy("memory", mountinfo(tmp_path, *lines))
    assert found == Hierarchy(controller="memory", unified=False, root="/", place=f"{tmp_path}/memory")
    assert found.group_of("4:memory:/m\n3:cpu:/c\n0::/u\n") == ControlGroup(found, f"{tmp_path}/memory/m")
    alone = find_hierarchy("memory", mountinfo(tmp_path, lines[0], lines[2]))
    assert alone == Hierarchy(controller="memory", unified=True, root="/", place=f"{tmp_path}/unified")


def test_a_mount_with_a_blank_in_its_name_is_found_and_a_hidden_one_is_not(tmp_path: Path) -> None:
    group(tmp_path / "all groups")
    mounts = mountinfo(
        tmp_path,
        f"31 22 0:27 / {tmp_path}/all\\040groups rw - cgroup2 cgroup2 rw",
        f"33 22 0:29 / {tmp_path}/hidden rw - cgroup cgroup rw,cpu",
    )
    assert find_hierarchy("cpu", mounts) == Hierarchy(
        controller="cpu", unified=True, root="/", place=f"{tmp_path}/all groups"
    )
    assert find_hierarchy("cpu", mountinfo(tmp_path)) is None


@pytest.mark.parametrize(
    ("unified", "root", "membership", "found"),
    [
        (False, "/", "4:cpu,cpuacct:/a/b\n3:memory:/m\n0::/u\n", "/place/a/b"),
        (False, "/", "4:cpu:/\n0::/u\n", "/place"),
        (False, "/docker/4f", "4:cpu:/docker/4f/job\n", "/place/job"),
        (False, "/docker/4f", "4:cpu:/docker/4f\n", "/place"),
        (False, "/docker/4f", "4:cpu:/docker/4ff\n", None),
        (False, "/", "4:cpu:/../other\n", None),
        (False, "/", "4:cpuset:/a\n0::/u\n", None),
        # Version 2 takes the line without controllers.
        (True, "/", "1:name=systemd:/s\n0::/user.slice/a:b\n", "/place/user.slice/a:b"),
    ],
)
def test_the_group_is_looked_for_below_what_is_mounted(
    *, unified: bool, root: str, membership: str, found: str | None
) -> None:
    group = Hierarchy("cpu", unified, root, "/place").group_of(membership)
    assert (group and group.path) == found


def limit_of(place: Path, job: str, *, unified: bool) -> tuple[float | None, float, int, int]:
    """Cores, throttled time and periods of a group, and those in which it was throttled."""
    record = read_cpu_limit(ControlGroup(Hierarchy("cpu", unified, "/", str(place)), f"{place}/{job}"))
    assert record["kind"] == "cgroup"
    return record["quota_cores"], record["throttled_us"], record["periods"], record["throttled_periods"]


def test_the_nearest_group_with_a_quota_is_the_one_that_counts(tmp_path: Path) -> None:
    group(tmp_path)
    stat = "usage_usec 9\nnr_periods 40\nnr_throttled 30\nthrottled_usec 1234"
    group(tmp_path / "slice", cpu_max="150000 100000", cpu_stat=stat)
    group(tmp_path / "slice/job", cpu_max="max 100000", cpu_stat="nr_periods 0\nnr_throttled 0\nthrottled_usec 0")
    assert limit_of(tmp_path, "slice/job", unified=True) == (1.5, 1234, 40, 30)


def test_the_tightest_quota_on_the_way_up_is_the_one_that_counts(tmp_path: Path) -> None:
    # Version 2 lets a group have more than the one around it, which holds it back all the same.
    group(tmp_path)
    stat = "nr_periods 40\nnr_throttled 30\nthrottled_usec 1234"
    group(tmp_path / "slice", cpu_max="200000 100000", cpu_stat=stat)
    group(tmp_path / "slice/pod", cpu_max="800000 100000", cpu_stat="nr_periods 1\nnr_throttled 0\nthrottled_usec 0")
    group(tmp_path / "slice/pod/job", cpu_max="max 100000")
    assert limit_of(tmp_path, "slice/pod/job", unified=True) == (2.0, 1234, 40, 30)


def test_version_1_counts_nanoseconds(tmp_path: Path) -> None:
    group(tmp_path, cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    stat = "nr_periods 10\nnr_throttled 9\nthrottled_time 7000000\nwait_sum 1"
    group(tmp_path / "job", cpu_cfs_quota_us="30000", cpu_cfs_period_us="100000", cpu_stat=stat)
    assert limit_of(tmp_path, "job", unified=False) == (0.3, 7000, 10, 9)


def test_without_a_quota_anywhere_there_is_no_limit(tmp_path: Path) -> None:
    group(tmp_path / "job", cpu_max="max 100000")
    assert limit_of(tmp_path, "job", unified=True) == (None, 0, 0, 0)


def test_a_process_that_is_gone_is_answered_for_by_ourselves() -> None:
    groups = GroupFinder("cpu")
    try:
        own = read_cpu_limit(groups.find(None))
    except OSError as error:
        # As in a container that shows no control groups.
        assert "no control group" in str(error)  # noqa: PT017 - both answers are right, and this machine decides which
    else:
        assert read_cpu_limit(groups.find(1 << 30))["quota_cores"] == own["quota_cores"]

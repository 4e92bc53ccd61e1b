"""What is written for the kernel, in directories that stand for its trees: a machine has only one version mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import MultinodeError
from multinode.node.facts.cgroups import Hierarchy
from tests.equipment.cgroups import (
    Controller,
    find_top,
    group_path,
    is_disabled,
    set_limit,
)

LIMIT = 700 << 20


def top_of(place: Path, controller: Controller, *, unified: bool) -> Hierarchy:
    (place / "cgroup.procs").write_text("")
    if unified:
        (place / "cgroup.controllers").write_text("cpu io memory pids\n")
        (place / "cgroup.subtree_control").write_text("pids\n")
    return Hierarchy(controller, unified, "/", str(place))


def texts(group: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in group.iterdir()}


def mountinfo(folder: Path, *lines: str) -> str:
    path = folder / "mountinfo"
    path.write_text("".join(f"31 22 0:27 / {line}\n" for line in lines))
    return str(path)


def test_version_2_has_both_limits_in_one_group_and_takes_one_of_them_off(tmp_path: Path) -> None:
    cpu, memory = top_of(tmp_path, "cpu", unified=True), top_of(tmp_path, "memory", unified=True)
    group = set_limit(cpu, "node0", 0.5)
    assert set_limit(memory, "node0", LIMIT) == group
    # The kernel puts it there where it accounts for swap.
    (group / "memory.swap.max").write_text("max")
    set_limit(memory, "node0", LIMIT)
    limits = {"cpu.max": "50000 100000", "memory.max": str(LIMIT), "memory.swap.max": "0"}
    assert texts(group) == limits
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    set_limit(memory, "node0", None)
    assert texts(group) == limits | {"memory.max": "max", "memory.swap.max": "max"}


def test_version_1_has_a_limit_for_memory_alone_and_one_together_with_swap(tmp_path: Path) -> None:
    top = top_of(tmp_path, "memory", unified=False)
    group = group_path(top, "node0")
    group.mkdir()
    (group / "memory.memsw.limit_in_bytes").write_text("9223372036854771712")
    set_limit(top, "node0", LIMIT)
    assert texts(group) == {"memory.limit_in_bytes": str(LIMIT), "memory.memsw.limit_in_bytes": str(LIMIT)}


def test_a_kernel_that_does_not_account_for_swap_is_asked_for_no_limit_of_it(tmp_path: Path) -> None:
    top = top_of(tmp_path, "memory", unified=False)
    assert texts(set_limit(top, "node0", LIMIT)) == {"memory.limit_in_bytes": str(LIMIT)}


def test_a_group_that_is_not_there_has_no_limit_to_lift(tmp_path: Path) -> None:
    set_limit(top_of(tmp_path, "memory", unified=True), "node0", None)
    assert not group_path(top_of(tmp_path, "memory", unified=True), "node0").exists()


def test_a_refusal_names_the_group_and_what_mends_it(tmp_path: Path) -> None:
    top = Hierarchy("memory", unified=False, root="/", place=str(tmp_path / "nowhere"))
    with pytest.raises(MultinodeError, match=r"nowhere/mn-node0-\d+ cannot be changed: No such file") as refused:
        set_limit(top, "node0", LIMIT)
    assert "--privileged" in str(refused.value.hint)


def test_the_tree_that_has_the_controller_is_taken(tmp_path: Path) -> None:
    for name in ("memory", "unified"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("")
    (tmp_path / "unified/cgroup.controllers").write_text("cpu io\n")
    mounts = mountinfo(
        tmp_path,
        f"{tmp_path}/unified rw - cgroup2 cgroup2 rw",
        f"{tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"{tmp_path}/hidden rw - cgroup cgroup rw,memory",
    )
    memory, cpu = find_top("memory", mounts), find_top("cpu", mounts)
    assert memory is not None
    assert cpu is not None
    assert (memory.unified, memory.place) == (False, str(tmp_path / "memory"))
    assert (cpu.unified, cpu.place) == (True, str(tmp_path / "unified"))
    alone = mountinfo(tmp_path, f"{tmp_path}/unified rw - cgroup2 cgroup2 rw")
    assert find_top("memory", alone) is None


def test_a_controller_that_was_left_out_when_the_kernel_started_is_told(tmp_path: Path) -> None:
    table = tmp_path / "cgroups"
    table.write_text("#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\nmemory\t0\t1\t0\n")
    assert is_disabled("memory", table)
    assert not is_disabled("cpu", table)
    assert not is_disabled("memory", tmp_path / "nowhere")

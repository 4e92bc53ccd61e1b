from __future__ import annotations

from pathlib import Path

import pytest

from multinode.agent.facts.cgroups import Hierarchy
from multinode.agent.sample.memory_kills import MemoryKills, counter_of, find_counter, read_counter

from .localnode import LocalNode

MACHINE = "/proc/vmstat"
# As Linux 6.18 writes them.
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
EVENTS = "low 0\nhigh 0\nmax 212\noom 7\noom_kill {}\noom_group_kill 0\nsock_throttled 0\n"


def told(path: Path, kills: int, text: str = EVENTS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(kills))
    return str(path)


def tree(place: Path, *, unified: bool) -> Hierarchy:
    return Hierarchy(controller="memory", unified=unified, root="/", place=str(place))


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


def test_version_1_is_asked_in_the_tree_of_memory(tmp_path: Path) -> None:
    file = told(tmp_path / "job/memory.oom_control", 1, OOM_CONTROL)
    assert counter_of(tree(tmp_path, unified=False), "5:memory:/job\n4:cpu:/other\n0::/\n") == file


def test_a_group_without_the_controller_is_answered_for_by_the_one_around_it(tmp_path: Path) -> None:
    file = told(tmp_path / "slice/memory.events", 1)
    (tmp_path / "slice/scope/leaf").mkdir(parents=True)
    assert counter_of(tree(tmp_path, unified=True), "0::/slice/scope/leaf\n") == file


def test_without_a_group_that_counts_the_machine_is_asked(tmp_path: Path) -> None:
    # As the root of a machine of version 2, which has no such file, and as a container without control groups.
    assert counter_of(tree(tmp_path, unified=True), "0::/\n") == MACHINE
    assert counter_of(tree(tmp_path, unified=True), "0::/../elsewhere\n") == MACHINE
    assert counter_of(None, "0::/\n") == MACHINE


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
    assert read_counter(find_counter(None)) is not None
    assert find_counter(1 << 30) == find_counter(None)


def test_a_run_that_was_not_starved_says_so(node: LocalNode) -> None:
    argv = node.script("print('done')")
    code, records = node.call("supervise", node.request("r", argv, detach=True))
    assert code == 0, records
    assert node.wait_for_end("r")["oom_kills"] == 0

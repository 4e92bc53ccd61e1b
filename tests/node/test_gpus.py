from __future__ import annotations

import os
from pathlib import Path

import pytest

from multinode.node.facts.gpus import Holder, find_nvidia_smi, join_processes, parse_gpus, parse_processes, uses_gpu
from tests.golden import Golden, raised

# From nvidia_gpu_exporter's public capture of a desktop with an RTX 4080 SUPER, driver 595.71.05, under two ffmpeg
# (its uuid is masked there): the columns that gpus.py asks for, without units as it asks.
TABLE = "0, NVIDIA GeForce RTX 4080 SUPER, 16376, 1474, 595.71.05, GPU-00000000-0000-0000-0000-000000000000, [N/A]\n"
PROCESSES = """GPU-00000000-0000-0000-0000-000000000000, 2165, 25
GPU-00000000-0000-0000-0000-000000000000, 5022, 503
GPU-00000000-0000-0000-0000-000000000000, 5021, 360
"""
# From a public benchmark log of a box with four H100, taken with --query-compute-apps=gpu_uuid,pid,used_gpu_memory;
# here without units.
BUSY = """GPU-e82ab913-2d6b-1a55-89a8-9ad23a5a09cf, 1912379, 518
GPU-f7c1496c-b7f5-b1d2-78ea-68826f778059, 3891903, 74698
GPU-cfd9ce0a-b7af-895a-f54c-4f175b610977, 1912379, 518
"""
UUID = "GPU-00000000-0000-0000-0000-000000000000"


def test_the_table_of_nvidia_smi_is_read() -> None:
    assert parse_gpus(TABLE) == [
        {
            "index": 0,
            "name": "NVIDIA GeForce RTX 4080 SUPER",
            "memory_total_mib": 16376.0,
            "memory_used_mib": 1474.0,
            "driver": "595.71.05",
            "uuid": UUID,
            "mig": False,
        }
    ]


def test_a_gpu_in_mig_mode_and_one_that_is_lost_are_read_with_the_others() -> None:
    lost = "1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]\n"
    broken = "2, ERR!, ERR!, ERR!, 550.54.15, GPU-2, ERR!\n"
    whole, gone, failed = parse_gpus(TABLE.replace("[N/A]", "Enabled") + lost + broken)
    assert (whole["mig"], gone["mig"]) == (True, False)
    assert (gone["name"], gone["memory_total_mib"], failed["memory_used_mib"]) == ("[GPU is lost]", None, None)


def test_nvidia_smi_is_found_where_wsl_has_it(tmp_path: Path) -> None:
    assert find_nvidia_smi("/nowhere", str(tmp_path)) is None
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    assert find_nvidia_smi("/nowhere", str(tmp_path)) == str(program)


@pytest.mark.parametrize(
    ("file", "uses"),
    # Linux; WSL 2, where Windows has the driver; what no GPU is.
    [("/dev/nvidia-uvm", True), ("/dev/dxg", True), ("/dev/null", False), ("/home/dev/dxg", False)],
)
def test_a_process_uses_a_gpu_if_it_has_a_device_of_it_open(tmp_path: Path, file: str, *, uses: bool) -> None:
    (tmp_path / "12" / "fd").mkdir(parents=True)
    (tmp_path / "12" / "fd" / "0").symlink_to("/dev/null")
    (tmp_path / "12" / "fd" / "7").symlink_to(file)
    assert uses_gpu(12, str(tmp_path)) is uses
    assert not uses_gpu(13, str(tmp_path))


def test_a_card_that_does_not_tell_has_none() -> None:
    (gpu,) = parse_gpus("0, NVIDIA GB10, [N/A], [N/A], 580.95.05, GPU-1, [N/A]\n")
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"]) == (None, None)
    assert parse_processes("GPU-1, 12, [N/A]\n") == [Holder("GPU-1", 12, None)]


def test_processes_stand_under_their_gpu() -> None:
    holders = parse_processes(BUSY)
    assert holders[1] == Holder("GPU-f7c1496c-b7f5-b1d2-78ea-68826f778059", 3891903, 74698.0)
    gpus = [{"index": index, "uuid": holder.uuid} for index, holder in enumerate(holders)]
    joined = join_processes([*gpus, {"index": 9, "uuid": "GPU-idle"}], holders, {})
    assert [[one["pid"] for one in gpu["processes"]] for gpu in joined] == [[1912379], [3891903], [1912379], []]
    assert [one["memory_mib"] for one in joined[1]["processes"]] == [74698.0]


def test_no_process_is_no_line() -> None:
    assert parse_processes("") == []
    assert join_processes(parse_gpus(TABLE), [], {})[0]["processes"] == []
    assert len(join_processes(parse_gpus(TABLE), parse_processes(PROCESSES), {})[0]["processes"]) == 3


def test_a_pid_that_is_nobody_here_has_no_name() -> None:
    (gpu,) = join_processes(parse_gpus(TABLE), [Holder(UUID, 2**22 + 1, 100.0)], {})
    assert gpu["processes"] == [{"pid": 2**22 + 1, "memory_mib": 100.0, "user": None, "command": None, "run_id": None}]


def test_a_pid_of_this_machine_has_a_user_a_command_and_its_run_and_in_a_container_only_with_a_card_open() -> None:
    (gpu,) = join_processes(parse_gpus(TABLE), [Holder(UUID, os.getpid(), 100.0)], {os.getpid(): "sft.0"})
    (process,) = gpu["processes"]
    if str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]":
        assert process["run_id"] == "sft.0"
        assert process["user"] is not None
        assert process["command"]
    else:
        assert (process["run_id"], process["user"], process["command"]) == (None, None, None)


def test_something_else_is_an_error(golden: Golden) -> None:
    text = "No devices were found\n"
    errors = {parse.__name__: raised(ValueError, parse, text) for parse in (parse_gpus, parse_processes)}
    golden.check_errors("no_gpus", errors)

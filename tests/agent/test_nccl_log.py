from __future__ import annotations

from pathlib import Path

from multinode.agent.bench.collectives import read_nccl_log


def test_only_the_telling_lines_of_that_process_are_given(tmp_path: Path) -> None:
    (tmp_path / "nccl.node0.42.log").write_text(
        "node0:42:42 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =ens1f0\n"
        "node0:42:42 [0] NCCL INFO Using network Socket\n"
        "node0:42:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    (tmp_path / "nccl.node0.43.log").write_text("node0:43:43 [1] NCCL INFO Using network IB\n")
    lines = read_nccl_log(str(tmp_path), 42)
    assert [line.partition("NCCL INFO ")[2] for line in lines] == [
        "Using network Socket",
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
    ]


def test_a_run_without_such_a_log_gives_nothing(tmp_path: Path) -> None:
    assert read_nccl_log(str(tmp_path / "[no such]"), 1) == []


def test_a_log_without_end_is_cut(tmp_path: Path) -> None:
    (tmp_path / "nccl.a.1.log").write_text("NCCL INFO Using network Socket\n" * 5000)
    assert len(read_nccl_log(str(tmp_path), 1)) == 400

"""What stands in front of a line, and what follows from it."""

from __future__ import annotations

import pytest

from multinode.diagnose.explanation import explain
from multinode.diagnose.log_line import parse_line, unwrap
from multinode.diagnose.log_words import read_log

MARKS = {
    "[rank3]: ": (3, None, None),
    "[rank3]:[E816 01:09:38.266897325 ProcessGroupNCCL.cpp:621] [Rank 1] ": (3, None, None),
    "[E ProcessGroupNCCL.cpp:475] [Rank 5] ": (5, None, None),
    "[PG ID 2 PG GUID 5(tp) Rank 6] ": (6, None, None),
    "[1,6]<stdout>:": (6, None, None),
    "[1]<stderr>:": (1, None, None),
    "[1,6]<stderr>:gpu-a:7:9 [0] misc/x.cc:5 NCCL WARN ": (6, "gpu-a", None),
    "18:11:06.680 [rank4]:": (4, None, None),
    "18:11:06 ": (None, None, None),
    "dlrm_main/0 [0]:": (None, None, None),
    "gpu-1: [rank9]: ": (9, "gpu-1", None),
    "slurmstepd-gpu20-15: ": (None, "gpu20-15", None),
    "(Worker_TP11 pid=113) ERROR 08-10 23:02:36 [file.py:898] ": (None, None, "Worker_TP11"),
    "(VllmWorker rank=1 pid=4711) ERROR 05-01 10:00:00 [a.py:1] ": (1, None, "VllmWorker"),
    "(Actor pid=66693, ip=10.0.0.9) [2025-01-27 06:57:08,484 E 66693 67052] logging.cc:365: ": (
        None,
        "10.0.0.9",
        "Actor",
    ),
    "[ERROR] 2026-09-07-13:02:57 (PID:14690, Device:1, RankID:3) ": (3, None, None),
    "<info>    [2021-12-07 10:43:05] 087c0ee7 || ": (None, "087c0ee7", None),
    "trainer-1  | ": (None, "trainer-1", None),
    "[hedp017:168955:0:168955] ": (None, "hedp017", None),
    " 41%|####      | 366/903 [5:15:39<6:53:09, 46.16s/it]": (None, None, None),
    "[rank: 2] ": (2, None, None),
    "> [rank2]: ": (2, None, None),
    "[2025-03-17 17:15:55 TP1] ": (None, None, "TP1"),
    "[1646833944.771934] [g07:2281 :0]  ib_iface.c:1012 UCX  ERROR ": (None, "g07", None),
    "server7:22461:22673 [0] misc/ibvwrap.cu:284 WARN ": (None, "server7", None),
}


@pytest.mark.parametrize("mark", MARKS)
def test_the_marks_of_a_line_tell_who_printed_it(mark: str) -> None:
    line = parse_line(f"{mark}Call to x failed")
    assert (line.rank, line.host, line.worker, line.text) == (*MARKS[mark], "Call to x failed")


@pytest.mark.parametrize(
    ("raw", "warns"),
    [
        ("server7:22461:22673 [0] misc/ibvwrap.cu:284 WARN Call to ibv_create_qp failed", True),
        ("server7:22461:22673 [0] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_create_qp failed", True),
        ("server7:22461:22673 [0] INFO transport/net_ib.cu:280 -> 2", False),
        ("data.cu:7 WARN slow", False),
    ],
)
def test_early_nccl_warns_without_its_name(raw: str, *, warns: bool) -> None:
    assert parse_line(raw).is_nccl_warning is warns


@pytest.mark.parametrize(
    "text", ["loss: 3: 4", "KeyError: 3", "mlx5: port down", "train.py: error: x", "1e-5 is small"]
)
def test_what_is_no_mark_stays(text: str) -> None:
    line = parse_line(text)
    assert (line.text, line.rank, line.host) == (text, None, None)


def test_a_warning_is_told_from_an_error() -> None:
    assert parse_line("W1120 14:00:00.1 99 event_file_writer.py:241] OSError: x").is_warning
    assert not parse_line("E1120 14:00:00.1 99 api.py:241] OSError: x").is_warning


WIDTH = 72
LONG = "[rank1]: RuntimeError: DataLoader worker (pid(s) 3021) exited unexpectedly, and nothing was said about it"


def test_a_paste_with_the_line_ends_of_a_terminal_is_joined() -> None:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
    lines = [
        "[rank1]: Traceback (most recent call last):",
        *(f"[rank1]: loading {word} " + " ".join(words[at:] + words[:at]) for at, word in enumerate(words)),
        LONG,
    ]
    cut = [line[at : at + WIDTH] for line in lines for at in range(0, len(line), WIDTH)]
    filled = "\n".join(piece if len(piece) == WIDTH else piece.ljust(WIDTH) for piece in cut)
    for paste in ("\n".join(cut), filled):
        assert LONG in unwrap(paste).split("\n")
        assert unwrap(paste).count("\n") == paste.count("\n")
        first = explain([("log", read_log(paste))]).first_failure
        assert first is not None
        assert (first.error_id, first.rank) == ("dataloader-exited", 1)


def test_lines_of_one_length_that_end_by_themselves_are_left() -> None:
    table = "\n".join(f"|{n:>10}|{n * 7:>60}|" for n in range(20))
    steps = "\n".join(
        f"[rank0]: step {n:04d} loss 0.{n:04d} of a run with many words in each line of its log" for n in range(20)
    )
    for text in (table, steps, "=" * 80 + "\n" + "-" * 80 + "\n" + "=" * 80 + "\nx\ny\nz"):
        assert unwrap(text) == text

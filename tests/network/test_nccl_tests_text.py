"""The text of nccl-tests, held against lines that its own programs print."""

from __future__ import annotations

from multinode.network.scan_evidence import CollectiveRow
from multinode.network.screen import nccl_tests_text
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.estimate import exactly
from tests.golden import Golden

# Printed by all_reduce_perf 2.13.
HEAD = """\
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
"""  # noqa: W291 - as it is printed
ROW = (
    "     1048576        262144     float     sum      -1"
    "    105.9    9.90   17.33      0    105.7    9.92   17.37      0"
)
TEST = CollectiveTest(messages=(Message(size_bytes=1 << 20),), warmup_iters=5, iters=100)


def row(time_us: float, collective: str = "all_reduce", num_wrong: int | None = 0) -> CollectiveRow:
    return CollectiveRow(
        collective=collective,
        redop="sum" if collective == "all_reduce" else "none",
        size_bytes=1 << 20,
        count=1 << 18,
        iters=100,
        time_us=exactly(time_us),
        p95_us=time_us,
        transfer_us=time_us,
        algbw_gb_per_s=9.92,
        busbw_gb_per_s=17.37,
        num_wrong=num_wrong,
    )


def columns(text: str) -> list[str]:
    return next(line for line in text.splitlines() if not line.startswith("#")).split()


def test_the_head_is_theirs_to_the_letter(golden: Golden) -> None:
    text = nccl_tests_text([row(105.7)], TEST, ["Rank  0 on node0"])
    assert HEAD in text
    cases = {"verified": text, "3 wrong": nccl_tests_text([row(1.0, num_wrong=3)], TEST, [])}
    cases["not verified"] = nccl_tests_text([row(1.0, num_wrong=None)], TEST, [])
    golden.check_texts("nccl_tests_text", cases)


def test_a_row_has_their_columns_and_the_way_that_was_not_run_says_so() -> None:
    line = next(line for line in nccl_tests_text([row(105.7)], TEST, []).splitlines() if not line.startswith("#"))
    assert len(line) == len(ROW)
    # torch's all-reduce works in place: those columns are equal to theirs.
    assert line[-32:] == ROW[-32:]
    assert line.split()[:5] == ROW.split()[:5]
    assert line.split()[5:9] == ["N/A"] * 4


def test_a_collective_with_two_buffers_is_out_of_place() -> None:
    cells = columns(nccl_tests_text([row(105.7, "all_gather")], TEST, []))
    assert cells[3:] == ["none", "-1", "105.7", "9.92", "17.37", "0", "N/A", "N/A", "N/A", "N/A"]


def test_times_have_as_many_digits_as_theirs() -> None:
    shown = [columns(nccl_tests_text([row(time_us)], TEST, []))[9] for time_us in (5.631, 105.91, 90330.4)]
    assert shown == ["5.63", "105.9", "90330"]


def test_each_collective_has_a_block_of_its_own() -> None:
    text = nccl_tests_text([row(1.0), row(2.0, "all_gather")], TEST, [])
    assert text.count("# Out of bounds values") == 2
    assert text.index("# Collective test: all_reduce") < text.index("# Collective test: all_gather")


def test_the_step_is_that_of_the_sizes_that_were_asked_for() -> None:
    for sizes, said in (
        ((1, 2, 3), "1(bytes)"),
        ((4, 16, 64), "4(factor)"),
        ((5,), "0(bytes)"),
        ((3, 7, 30), "0(bytes)"),
    ):
        test = CollectiveTest(messages=tuple(Message(size_bytes=size) for size in sizes))
        assert f"step: {said} " in nccl_tests_text([row(1.0)], test, [])

"""`explain` of dumps of torch's flight recorder that some run left: pickles and JSON, alone and beside logs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from multinode.diagnose.explanation import Explanation, explain_logs
from tests.diagnose.test_desync import DONE, WORLD, call, dump

# The words of torch 2.5's watchdog, pytorch/pytorch#134017.
WATCHDOG = (
    "[rank1]:[E820 10:00:00.000000000 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600028 milliseconds "
    "before timing out.\n"
)


def write(folder: Path, *, missing: int | None = None, without: int | None = None, ranks: int = 4) -> None:
    """The dumps of a watchdog as it names them, with torch's ranks as text and no time."""
    for rank in range(ranks):
        told = dump(rank, [DONE, *([call(7, "all_reduce")] if rank != missing else [])])
        told["pg_config"] = {"0": {**WORLD, "ranks": "[0, 1, 2, 3]"}}
        del told["rank"], told["time_ns"]
        for entry in told["entries"]:
            entry["process_group"] = tuple(entry["process_group"])
            entry["frames"] = [
                {
                    "name": "all_reduce",
                    "filename": "/env/site-packages/torch/distributed/distributed_c10d.py",
                    "line": 1,
                },
                {"name": "main", "filename": "/home/a/train.py", "line": 88},
            ]
        if rank != without:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(told, protocol=2))


def explain(folder: Path) -> Explanation:
    return explain_logs([str(folder)], lambda *_: None)


def message(folder: Path) -> str:
    first = explain(folder).first_failure
    assert first is not None
    return first.message


def test_pickles_name_the_rank_that_is_missing_with_the_line_of_the_others(tmp_path: Path) -> None:
    write(tmp_path, missing=2)
    told = explain(tmp_path).first_failure
    assert told is not None
    assert told.message == "rank 2 has not entered all_reduce #7 (train.py:88); ranks 0, 1, 3 wait in this collective"
    assert (told.rank, told.kind, Path(told.file).name) == (2, "hang", "nccl_trace_rank_2")


def test_the_watchdogs_own_message_is_a_consequence(tmp_path: Path) -> None:
    write(tmp_path, missing=2)
    (tmp_path / "node0.log").write_text(WATCHDOG)
    told = explain(tmp_path)
    assert told.first_failure is not None
    assert told.first_failure.rank == 2
    assert [Path(other.file).name for other in told.other_failures] == ["node0.log"]


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    write(tmp_path, without=3)
    assert message(tmp_path) == "rank 3 left no dump; ranks 0-2 wait in all_reduce #7 (train.py:88)"


def test_a_collective_that_all_have_entered_blames_nobody(tmp_path: Path) -> None:
    write(tmp_path)
    assert message(tmp_path) == "all 4 ranks have entered all_reduce #7 (train.py:88), but it has not finished"
    told = explain(tmp_path).first_failure
    assert told is not None
    assert told.rank is None


@pytest.mark.parametrize("suffix", ["", ".json"])
def test_json_is_read_as_pickles_are(tmp_path: Path, suffix: str) -> None:
    for rank in range(4):
        told = dump(rank, [DONE, *([call(7, "all_gather")] if rank else [])])
        (tmp_path / f"trace_{rank}{suffix}").write_text(json.dumps(told))
    assert message(tmp_path).startswith(
        "rank 0 has not entered all_gather #7; ranks 1-3 wait in this collective for 41 s"
    )


def test_a_log_whose_name_ends_in_a_number_stays_a_log(tmp_path: Path) -> None:
    (tmp_path / "slurm-1234").write_text(WATCHDOG)
    told = explain(tmp_path).first_failure
    assert told is not None
    assert told.message == "rank 1: the collective timed out: allreduce took longer than 600 s"


# The entry of PyTorch's tutorial on the flight recorder (flight_recorder_tutorial.rst), two ranks, and with numbers as
# text, as the tests of torch's own analyzer have them (test_fr_analysis.py).
TUTORIAL = {
    "version": "2.5",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 2, "last_started_collective": -1, "last_completed_collective": 2}},
    "entries": [
        {
            "frames": [{"name": "test_short_pickle", "filename": "test/distributed/test_c10d_nccl.py", "line": 3647}],
            "record_id": 0,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": "1",
            "p2p_seq_id": "0",
            "op_id": 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1724779239936775119,
            "input_sizes": [[3, 4]],
            "input_dtypes": "float32",
            "output_sizes": [[3, 4]],
            "output_dtypes": "float32",
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 600000,
            "is_p2p": False,
        }
    ],
}


def test_the_form_that_torch_documents(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_text(json.dumps(TUTORIAL))
    (tmp_path / "nccl_trace_rank_1").write_text(json.dumps({**TUTORIAL, "entries": []}))
    assert (
        message(tmp_path)
        == "rank 1 has not entered all_reduce #1 (test_c10d_nccl.py:3647); rank 0 waits in this collective"
    )

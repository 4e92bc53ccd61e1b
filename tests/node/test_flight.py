"""Dumps of torch's flight recorder that a watchdog left on a node; a worker may have written anything there."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from multinode.node.flight import read_watchdog_dumps
from multinode.records.flight import decode_flight

from .localnode import LocalNode

OWN = {"name": "main", "filename": "/home/a/train.py", "line": 88}
TORCH = {"name": "all_reduce", "filename": "/env/lib/python3.11/site-packages/torch/distributed/x.py", "line": 1}


def dump(count: int, ranks: str = "[0, 1]") -> dict[str, Any]:
    """A dump as torch 2.13 pickles it: ranks as text, frames, and fields that are not told."""
    entries = [
        {
            "collective_seq_id": number,
            "frames": [TORCH, OWN, OWN],
            "input_dtypes": ["Float"],
            "input_sizes": ((8,),),
            "is_p2p": False,
            "output_sizes": ((8,),),
            "process_group": ("0", "default_pg"),
            "profiling_name": "nccl:all_reduce",
            "retired": number < count,
            "state": "completed" if number < count else "started",
            "time_created_ns": number,
            "timeout_ms": 600000,
        }
        for number in range(1, count + 1)
    ]
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "entries": entries,
    }


def test_the_last_collectives_of_a_dump_are_told_with_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_3").write_bytes(pickle.dumps(dump(9), protocol=2))
    (tmp_path / "json_4").write_text(json.dumps(dump(1)))
    first, second = read_watchdog_dumps([str(tmp_path / "nccl_trace_rank_3"), str(tmp_path / "json_4")])
    assert (first["rank"], first["source"], second["rank"]) == (3, "watchdog", 4)
    told = decode_flight(first["flight"])
    assert told is not None
    assert [(entry.number, entry.has_ended) for entry in told.entries] == [(6, True), (7, True), (8, True), (9, False)]
    assert [(frame.filename, frame.line) for frame in told.entries[-1].frames] == [("/home/a/train.py", 88)]
    assert told.pg_config["0"].members == (0, 1)


def test_a_text_is_no_longer_than_a_reader_takes(tmp_path: Path) -> None:
    large = dump(0)
    many = [{**entry, "process_group": (str(group), "")} for group in range(80) for entry in dump(4)["entries"]]
    (tmp_path / "rank_0").write_bytes(pickle.dumps({**large, "entries": many}))
    (record,) = read_watchdog_dumps([str(tmp_path / "rank_0")])
    assert 4000 < len(record["flight"]) <= 16_000


class Evil:
    """Reading it would run a program."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo read",)


def nested() -> list[Any]:
    """A few bytes that are 2**60 values."""
    value: list[Any] = ["x"]
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(pickle.dumps(dump(3))[:200], id="cut"),
        pytest.param(pickle.dumps(dump(0)), id="no-collective"),
        pytest.param(pickle.dumps({"entries": Evil()}), id="program"),
        pytest.param(pickle.dumps({"entries": [{"profiling_name": nested()}]}), id="nested"),
        pytest.param(pickle.dumps([1]), id="list"),
        pytest.param(b'{"entries": [3]}', id="other-json"),
        pytest.param(b"\x80\xff\x00", id="garbage"),
    ],
)
def test_a_file_of_anything_else_is_passed_over(tmp_path: Path, data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0").write_bytes(data)
    (tmp_path / "rank_x").write_bytes(pickle.dumps(dump(3)))
    names = ["rank_0", "rank_1", "rank_x"]
    assert list(read_watchdog_dumps([str(tmp_path / name) for name in names])) == []
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("variable", [None, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
@pytest.mark.parametrize("code", [0, 3])
def test_dumps_come_home_where_the_job_did_not_end_well(node: LocalNode, variable: str | None, code: int) -> None:
    prefix = node.home / "dumps_"
    # One that another run left.
    stale = Path(f"{prefix}7")
    stale.write_bytes(pickle.dumps(dump(2)))
    os.utime(stale, (1.0, 1.0))
    argv = node.script(
        "import os, sys\n"
        "folder = os.environ['MULTINODE_RUN_DIR'] + '/nccl_trace_rank_'\n"
        f"with open(os.environ.get({variable or 'NONE'!r}, folder) + '1', 'wb') as file:\n"
        f"    file.write({pickle.dumps(dump(2))!r})\n"
        f"sys.exit({code})\n"
    )
    env = {} if variable is None else {variable: str(prefix)}
    with node.supervise(argv, env=env) as talk:
        talk.read_all()
    records = [json.loads(line) for line in talk.data("samples/watchdog.jsonl").splitlines()]
    assert [(record["rank"], record["source"]) for record in records] == ([(1, "watchdog")] if code else [])

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.node.nccl_files import FOLDER, InspectorReader, find_inspector, shorten
from tests.profile.inspector_records import ALL_REDUCE, REDUCE_SCATTER, line


def test_a_record_of_the_plugin_becomes_a_sample() -> None:
    assert shorten(line(ALL_REDUCE)) == {
        "kind": "nccl_op",
        "comm": "0x7f8c496ae9f661",
        "comm_rank": 2,
        "comm_ranks": 8,
        "nodes": 1,
        "op": "AllReduce",
        "number": 1407,
        "size_bytes": 17179869184,
        "time_us": 61974.0,
        "busbw_gb_per_s": 485.119099,
        "timing": None,
        "written_s": 1748030377.748202,
    }
    verbose = shorten(line(REDUCE_SCATTER))
    assert verbose is not None
    assert (verbose["op"], verbose["timing"]) == ("ReduceScatter", "kernel_gpu")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b'{"header": {}}', b'{"header": 1, "coll_perf": 2}', b"\xff"]
)
def test_what_is_no_record_of_a_collective_is_none(text: bytes) -> None:
    assert shorten(text) is None
    point_to_point = {**ALL_REDUCE, "p2p_perf": {"p2p": "Send"}}
    del point_to_point["coll_perf"]
    assert shorten(line(point_to_point)) is None


def test_files_are_read_on_as_they_grow_and_half_a_line_waits(tmp_path: Path) -> None:
    reader = InspectorReader(str(tmp_path))
    # Before any process has loaded the plugin.
    assert reader.read() == []
    folder = tmp_path / FOLDER
    folder.mkdir()
    file, text = folder / "host-pid7.log", line(REDUCE_SCATTER)
    file.write_bytes(line(ALL_REDUCE) + b"no record\n" + text[:50])
    assert [one["op"] for one in reader.read()] == ["AllReduce"]
    assert reader.read() == []
    with file.open("ab") as more:
        more.write(text[50:])
    (folder / "host-pid8.log").write_bytes(line(ALL_REDUCE))
    assert [one["op"] for one in reader.read()] == ["ReduceScatter", "AllReduce"]


def test_a_line_without_an_end_does_not_hold_up_what_follows(tmp_path: Path) -> None:
    reader, folder = InspectorReader(str(tmp_path)), tmp_path / FOLDER
    folder.mkdir()
    (folder / "a-pid1.log").write_bytes(b"x" * (1 << 17))
    assert reader.read() == []
    with (folder / "a-pid1.log").open("ab") as more:
        more.write(b"\n" + line(ALL_REDUCE))
    assert len(reader.read()) == 1


def test_the_plugin_is_found_where_it_may_lie(tmp_path: Path) -> None:
    name = "libnccl-profiler-inspector.so"
    python = str(tmp_path / "env/bin/python")
    places = {
        "own": tmp_path / "own" / "my-inspector.so",
        "path": tmp_path / "path" / name,
        "torch": tmp_path / "env/lib/python3.11/site-packages/nvidia/nccl/lib" / name,
        "system": tmp_path / "system" / "librccl-profiler-inspector.so",
    }
    folders, env = (str(tmp_path / "system"),), {"LD_LIBRARY_PATH": f":{tmp_path}/path:/no"}
    assert find_inspector(env, python, folders) is None
    for which in ("system", "torch", "path", "own"):
        places[which].parent.mkdir(parents=True)
        places[which].touch()
        if which == "own":
            env["NCCL_PROFILER_PLUGIN"] = str(places["own"])
        assert find_inspector(env, python, folders) == str(places[which])
    assert find_inspector({"NCCL_PROFILER_PLUGIN": "/no/inspector.so"}, None, ()) is None

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.launch.attach import choose_logs, choose_nodes, follow_logs, node_logs
from multinode.launch.context import RunContext
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun, load_run, load_runs
from multinode.transport.fake import FakeTransport
from tests import make
from tests.golden import Golden, error_of

RUN = make.run("box-a", "box-b", run_id="20260102-aa", job="sft.yaml (LLaMA-Factory sft)", started_s=1.5, ended_s=9.5)
SUMMARY = make.summary(14.0, run_id=RUN.run_id, rule="steps 6 to 30")


def store(root: Path, run_id: str = RUN.run_id) -> RunDirectory:
    return make.store(root, run_id, run=msgspec.structs.replace(RUN, run_id=run_id))


def plan_of(run: Run, workers: tuple[int, ...]) -> LaunchPlan:
    return make.plan(*(node.name for node in run.nodes), workers=workers)


def test_a_run_comes_back_with_its_figures(tmp_path: Path) -> None:
    directory = store(tmp_path)
    directory.write("summary.json", SUMMARY)
    found = load_run(tmp_path, RUN.run_id)
    assert (found.run, found.summary, found.directory.path) == (RUN, SUMMARY, directory.path)


def test_a_run_that_got_nowhere_has_no_figures(tmp_path: Path) -> None:
    store(tmp_path)
    assert load_run(tmp_path, "last").summary is None


def test_runs_are_listed_oldest_first_whatever_they_are_called(tmp_path: Path) -> None:
    assert load_runs(tmp_path / "runs") == []
    for age_s, run_id in ((10, "new"), (30, "old"), (20, "middle")):
        record = store(tmp_path, run_id).path / "run.json"
        os.utime(record, (1e9 - age_s, 1e9 - age_s))
    assert [found.run.run_id for found in load_runs(tmp_path)] == ["old", "middle", "new"]


def test_a_record_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run_id in ("a", "b", "c"):
        store(tmp_path, run_id)
    (tmp_path / "b" / "run.json").write_text('{"run_id": 3')
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    listed = CliRunner().invoke(build_app(), ["runs", "--json"])
    assert [run["run_id"] for run in json.loads(listed.stdout)["runs"]] == ["a", "c"]
    assert f"not listed: {tmp_path}/b/run.json cannot be read" in listed.stderr


def test_no_odd_record_or_link_hides_the_good_runs_or_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run_id in ("directory", "fifo", "loop", "deep", "nul", "good"):
        store(tmp_path, run_id)
    for run_id in ("directory", "fifo", "loop"):
        (tmp_path / run_id / "run.json").unlink()
    (tmp_path / "directory/run.json").mkdir()
    os.mkfifo(tmp_path / "fifo/run.json")
    (tmp_path / "loop/run.json").symlink_to("run.json")
    (tmp_path / "deep/run.json").write_bytes(b'{"nodes":' + b"[" * 1_000_000)
    (tmp_path / "nul/summary.json").write_bytes(b"\x00" * 100)
    (tmp_path / "itself").symlink_to("itself")
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    listed = CliRunner().invoke(build_app(), ["runs", "--json"])
    assert [run["run_id"] for run in json.loads(listed.stdout)["runs"]] == ["good"]
    assert listed.stderr.count("not listed: ") == 2


def test_what_show_prints_holds_the_results_that_the_run_has_and_no_others(tmp_path: Path) -> None:
    directory = store(tmp_path)
    bare = load_run(tmp_path, "last").document()
    assert bare.directory == str(directory.path)
    assert {name: getattr(bare, name) for name in Run.__struct_fields__ if name != "schema"} == {
        name: getattr(RUN, name) for name in Run.__struct_fields__ if name != "schema"
    }
    assert not any(getattr(bare, name) for name in ("summary", "contrast", "nccl_test", "tuning", "bench", "code"))

    directory.write("summary.json", SUMMARY)
    directory.write("contrast.json", {"speedup": 0.5})
    directory.write("nccl-test.json", {"rows": []})
    full = load_run(tmp_path, "last").document()
    assert (full.summary, full.tuning) == (SUMMARY, None)
    assert (full.contrast, full.nccl_test) == ({"speedup": 0.5}, {"rows": []})


@pytest.mark.parametrize(
    ("node", "logs"),
    [
        (None, [("box-a", b"one\rtwo\n"), ("box-b", b"")]),
        ("box-a", [("box-a", b"one\rtwo\n")]),
        ("0", [("box-a", b"one\rtwo\n")]),
        ("1", [("box-b", b"")]),
    ],
)
def test_logs_are_given_raw_and_of_one_node_by_name_or_node_rank(
    tmp_path: Path, node: str | None, logs: list[tuple[str, bytes]]
) -> None:
    store(tmp_path).append_log(0, b"one\rtwo\n")
    stored = load_run(tmp_path, "last")
    found = node_logs(stored, choose_nodes(stored, node, None))
    assert [(name, b"".join(pieces)) for name, pieces in found] == logs


def test_a_run_a_node_or_a_log_that_is_not_there_is_an_error_with_what_is(tmp_path: Path, golden: Golden) -> None:
    root = tmp_path / "runs"
    for run_id in (RUN.run_id, "torn", "imported", "begun"):
        store(root, run_id).write("plan.json", plan_of(RUN, (1, 1)))
    store(tmp_path / "one")
    record = root / "torn" / "run.json"
    record.write_bytes(record.read_bytes()[:40])
    imported = msgspec.structs.replace(RUN, run_id="imported", kind="import", nodes=(), world_size=0)
    RunDirectory(root / "imported").write("run.json", imported)
    begun = msgspec.structs.replace(RUN, run_id="begun", kind="bench", has_parts=True)
    RunDirectory(root / "begun").write("run.json", begun)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    stored = load_run(root, RUN.run_id)
    cases = {
        "no such run": error_of(load_run, tmp_path / "one", "2027"),
        "its record is torn": error_of(load_run, root, "torn"),
        "the runs cannot be looked at": error_of(load_runs, loop),
        "no such rank": error_of(choose_nodes, stored, None, 4),
        "an import": error_of(choose_logs, root, load_run(root, "imported"), None, None),
        "rank 0 of an import": error_of(choose_logs, root, load_run(root, "imported"), None, 0),
        "a bench in which nothing has started": error_of(choose_logs, root, load_run(root, "begun"), None, None),
    }
    cases |= {f"no such node: '{node}'": error_of(choose_nodes, stored, node, None) for node in ("box", "2", "-1", "")}
    golden.check_errors("runs", cases, tmp_path)


def test_a_worker_is_found_on_its_node(tmp_path: Path) -> None:
    store(tmp_path).write("plan.json", plan_of(RUN, (3, 1)))
    stored = load_run(tmp_path, "last")
    places = [choose_nodes(stored, None, rank)[0].name for rank in range(4)]
    assert places == ["box-a", "box-a", "box-a", "box-b"]


def store_part(root: Path, run: Run, log: bytes) -> None:
    directory = make.store(root, run.run_id, plan=plan_of(run, (1,) * len(run.nodes)))
    directory.append_log(0, log)
    directory.write("run.json", run)


@pytest.mark.parametrize("kind", ["bench", "sweep", "contrast", "tuning"])
def test_logs_of_what_is_made_of_runs_are_those_of_its_runs(tmp_path: Path, kind: str, golden: Golden) -> None:
    whole = msgspec.structs.replace(RUN, run_id="w", kind=kind, has_parts=True)
    store(tmp_path, "w").write("run.json", whole)
    for rank, node in enumerate(RUN.nodes):
        alone = NodeRun(name=node.name, node_rank=0)
        part = msgspec.structs.replace(RUN, run_id=f"w-{rank}", kind=kind, world_size=1, nodes=(alone,), part_of="w")
        store_part(tmp_path, part, f"log of {node.name}\n".encode())
    # Named alike, and no part of it.
    store_part(tmp_path, msgspec.structs.replace(RUN, run_id="w-3", kind=kind), b"another\n")
    store_part(
        tmp_path, msgspec.structs.replace(RUN, run_id="x-0", kind=kind, part_of="x"), b"of another one of this kind\n"
    )

    def logs(node: str | None = None, rank: int | None = None) -> list[tuple[str, str, bytes]]:
        chosen = choose_logs(tmp_path, load_run(tmp_path, "w"), node, rank)
        return [
            (part.run.run_id, name, b"".join(pieces))
            for part, nodes in chosen
            for name, pieces in node_logs(part, nodes)
        ]

    first, second = ("w-0", "box-a", b"log of box-a\n"), ("w-1", "box-b", b"log of box-b\n")
    assert logs() == logs(rank=0) == [first, second]
    # By the node ranks of the whole, not of its parts.
    assert logs(node="1") == logs(node="box-b") == [second]
    assert logs(node="0") == [first]
    golden.check_errors("refused_logs", {"rank": error_of(logs, rank=1), "node": error_of(logs, node="box-c")})


@pytest.mark.parametrize("kind", ["bench", "sweep"])
def test_what_was_killed_while_it_measured_runs_no_longer(tmp_path: Path, kind: str) -> None:
    directory = store(tmp_path)
    directory.write("run.json", msgspec.structs.replace(RUN, kind=kind, has_parts=True, status="running", ended_s=None))
    with directory.lock():
        assert load_run(tmp_path, "last").run.status == "running"
    (listed,) = load_runs(tmp_path)
    assert (listed.run.status, listed.run.ended_s) == ("stopped", None)


def test_a_launch_goes_on_without_its_controller(tmp_path: Path) -> None:
    store(tmp_path).write("run.json", msgspec.structs.replace(RUN, status="running"))
    assert load_run(tmp_path, "last").run.status == "running"


def test_a_defect_of_who_follows_a_run_is_no_good_end_of_its_logs(tmp_path: Path) -> None:
    directory = store(tmp_path)
    directory.write("run.json", msgspec.structs.replace(RUN, status="running", ended_s=None))
    directory.write("plan.json", make.plan("box-a", workers=2))
    directory.write_cluster(make.cluster("box-a"), "")

    class Defective(RunContext):
        def with_part_of(self, run_id: str | None) -> RunContext:
            raise IndexError(run_id)

    with pytest.raises(IndexError):
        list(follow_logs(StoredRun(directory), (0,), Defective(FakeTransport(lambda *_: []), tmp_path)))

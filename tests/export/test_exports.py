"""Each export, read back by the library that it is for: the figures are those of `show --json`."""

from __future__ import annotations

import csv
import json
import statistics
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from multinode.errors import UsageError
from multinode.export.figures import SUMMARY_FIGURES, summary_values
from multinode.export.target import parse_targets
from multinode.launch.export import follow_export
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import load_run
from tests import make
from tests.profile.observing import PLAN, RUN, STEPS, observed, store_observed
from tests.warm import free_port

DEADLINE_S = 600.0
# DDP's counters of every step: 204.0 ms, of which 83.5 ms are overlapped.
EXPOSED_MS = 120.5
# Of a LevelDB log: bytes of a block, and of the header of a record.
BLOCK, LEAST = 32768, 7
# It stands beside the environment that trainings have, as they would import it (scripts/setup).
WANDB = Path(sys.prefix) / "wandb"
# Records of wandb's own format on stdin, each behind its length; as JSON on stdout.
RECORDS_AS_JSON = """
import json, struct, sys
from google.protobuf.json_format import MessageToDict
from wandb.proto.wandb_internal_pb2 import Record
while header := sys.stdin.buffer.read(4):
    record = Record.FromString(sys.stdin.buffer.read(struct.unpack("<I", header)[0]))
    print(json.dumps(MessageToDict(record)))
"""


def shown(directory: RunDirectory) -> dict[str, Any]:
    """What `show --json` prints of a run."""
    document: dict[str, Any] = msgspec.to_builtins(load_run(directory.path.parent, directory.run_id).document())
    return document


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return store_observed(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(stored: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MULTINODE_RUNS", str(stored.path.parent))
    return stored.path.parent


def export(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["export", *arguments])


def expected(directory: RunDirectory) -> dict[str, float]:
    """Figures of `show --json` by the path that an export gives them, looked up there and nowhere else."""
    summary = shown(directory)["summary"]
    found: dict[str, float] = {
        "samples_per_s": summary["samples_per_s"]["value"],
        "step_time_ms/median": summary["step_time_ms"]["median"]["value"],
        "comm/exposed_ms": summary["comm"]["exposed_ms"]["value"],
        "comm/exposed_share": summary["comm"]["exposed_share"],
        "comm/in_training_gb_per_s": summary["comm"]["in_training_gb_per_s"],
        "last_loss": summary["last_loss"],
    }
    for node in summary["nodes"]:
        found[f"nodes/{node['node']}/cpu_busy_percent"] = node["cpu_busy_percent"]
        for nic in node["nics"]:
            found[f"nodes/{node['node']}/nics/{nic['ifname']}/out_gbit_per_s"] = nic["out_gbit_per_s"]
    assert None not in found.values()
    return found


def float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    assert isinstance(rounded, float)
    return rounded


def test_every_figure_of_the_table_is_one_of_the_summary(stored: RunDirectory) -> None:
    summary = load_run(stored.path.parent, RUN.run_id).summary
    assert summary is not None
    document = msgspec.to_builtins(type(summary)(run_id="r", steps=0, steady_steps=0, rule=""))
    for name in SUMMARY_FIGURES:
        assert name.split(".")[0] in document
    values = summary_values(summary)
    assert {value.path: value.value for value in values}.items() >= expected(stored).items()
    assert len({value.path for value in values}) == len(values)


@pytest.mark.usefixtures("runs")
def test_tensorboard_reads_the_scalars_of_each_step_and_the_summary(stored: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    foreign = Path("tb") / RUN.run_id / "events.out.tfevents.1.node.2.0"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    # The second export takes the place of the first, and of no other program's.
    for _ in range(2):
        assert export("last", "tensorboard:tb").exit_code == 0
    assert len(list(foreign.parent.glob("events.*"))) == 2
    assert foreign.exists()
    events = EventAccumulator(str(Path("tb") / RUN.run_id), size_guidance={"scalars": 0}).Reload()
    times = events.Scalars("multinode/step_time_ms")
    assert [one.step for one in times] == list(range(1, STEPS + 1))
    assert statistics.median(one.value for one in times[5:]) == float32(expected(stored)["step_time_ms/median"])
    assert {one.value for one in events.Scalars("multinode/comm/exposed_ms")} == {EXPOSED_MS}
    losses = {one.step: one.value for one in events.Scalars("multinode/loss")}
    assert losses[40] == float32(shown(stored)["summary"]["last_loss"])
    assert times[0].wall_time == observed().steps[1][0].time_s
    for path, value in expected(stored).items():
        (one,) = events.Scalars(f"multinode/summary/{path}")
        assert (one.step, one.value) == (STEPS, float32(value)), path


def export_alone(*arguments: str) -> None:
    """In a process of its own, as a library changes the one that it is imported in."""
    command = [sys.executable, "-m", "multinode", "export", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("runs")
def test_mlflow_reads_the_file_store(stored: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    export_alone("last", "mlflow:mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_mlflow((Path.cwd() / "mlruns").as_uri(), stored)


def check_mlflow(uri: str, stored: RunDirectory) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("multinode")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["world_size"]) == (RUN.run_id, "FINISHED", "4")
    for path, value in expected(stored).items():
        assert run.data.metrics[f"multinode/summary/{path}"] == value, path
    history = client.get_metric_history(run.info.run_id, "multinode/comm/exposed_ms")
    assert sorted((one.step, one.value) for one in history) == [(step, EXPOSED_MS) for step in range(1, STEPS + 1)]


@pytest.mark.usefixtures("runs")
def test_wandb_reads_its_offline_files(stored: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(WANDB))
    export_alone("last", "wandb:here")
    (path,) = Path("here").glob("wandb/offline-run-*/run-*.wandb")
    history: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    packed = b"".join(struct.pack("<I", len(record)) + record for record in wandb_records(path))
    command = [sys.executable, "-c", RECORDS_AS_JSON]
    done = subprocess.run(command, input=packed, capture_output=True, check=True, timeout=DEADLINE_S)
    for record in map(json.loads, done.stdout.splitlines()):
        if "history" in record:
            history[int(record["history"]["step"]["num"])] = values_of(record["history"]["item"])
        summary |= values_of(record.get("summary", {}).get("update", []))
    exposed = {step: row["multinode/comm/exposed_ms"] for step, row in history.items()}
    assert exposed == dict.fromkeys(range(1, STEPS + 1), EXPOSED_MS)
    for name, value in expected(stored).items():
        assert summary[f"multinode/summary/{name}"] == value, name


def values_of(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Values by name."""
    return {item.get("key") or "/".join(item["nestedKey"]): json.loads(item["valueJson"]) for item in items}


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records in a file of wandb's: a LevelDB log with a header of seven bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place < len(data):
        left = BLOCK - place % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, place) if left >= LEAST else (0, 0, 0)
        if not kind:
            place += left
            continue
        parts += data[place + LEAST : place + LEAST + length]
        place += LEAST + length
        if kind in {1, 4}:
            yield parts
            parts = b""


def metrics(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by metric and labels, `run` aside, as Prometheus reads them."""
    return {
        family.name: {
            tuple(pair for pair in sorted(sample.labels.items()) if pair[0] != "run"): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


@pytest.mark.usefixtures("runs")
def test_prometheus_parses_the_textfile(stored: RunDirectory) -> None:
    assert export("last", "prometheus:run.prom").exit_code == 0
    assert Path("run.prom").stat().st_mode & 0o777 == 0o644
    found = metrics(Path("run.prom").read_text())
    summary = shown(stored)["summary"]
    assert found["multinode_summary_step_time_ms_median"] == {(): summary["step_time_ms"]["median"]["value"]}
    assert found["multinode_summary_comm_exposed_ms"] == {(): summary["comm"]["exposed_ms"]["value"]}
    assert found["multinode_summary_nodes_nics_share"] == {
        (("ifname", "ens1f0"), ("node", node["node"])): node["nics"][0]["share"] for node in summary["nodes"]
    }
    assert dict(next(iter(found["multinode_run_info"])))["status"] == "succeeded"


@pytest.mark.usefixtures("runs")
def test_csv_and_parquet_have_all_samples(stored: RunDirectory) -> None:
    import pyarrow.parquet

    assert export("last", "csv:tables,parquet:tables").exit_code == 0
    folder = Path("tables") / RUN.run_id
    table = pyarrow.parquet.read_table(folder / "steps.parquet").to_pylist()
    with (folder / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(table) == len(rows) == 4 * STEPS
    for row, written in zip(table, rows, strict=True):
        assert {name: "" if value is None else str(value) for name, value in row.items()} == written
    steps: dict[int, list[float]] = {}
    for row in table:
        if row["counted"]:
            steps.setdefault(row["step"], []).append(row["step_time_us"])
    median_ms = statistics.median(statistics.median(times) for times in steps.values()) / 1000
    assert median_ms == shown(stored)["summary"]["step_time_ms"]["median"]["value"]
    assert pyarrow.parquet.read_table(folder / "network.parquet").num_rows == sum(
        1 for line in (folder / "network.csv").read_text().splitlines()[1:] if line
    )


@pytest.mark.usefixtures("runs")
def test_a_target_that_fails_is_told_once_and_the_others_are_written() -> None:
    Path("file").write_text("in the way")
    done = export("last", "tensorboard:file", "prometheus:run.prom", "--json")
    assert done.exit_code == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        line for line in done.stderr.splitlines() if "tensorboard:file" in line
    ]
    assert done.stderr.count("error: ") == 1
    assert [one["error"] is None for one in json.loads(done.stdout)["exports"]] == [False, True]
    assert "multinode_summary" in Path("run.prom").read_text()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no target was given"),
        (("grafana:x",), "tensorboard:DIR"),
        (("tensorboard",), "not an export target"),
        (("prometheus:metrics.txt",), ".prom"),
        (("mlflow:http://me:secret@example.com",), "MLFLOW_TRACKING_PASSWORD"),
        (("metrics-port:99999",), "not a valid port"),
        (("metrics-port:9400",), "--follow"),
        (("tensorboard:a", "csv:b", "--follow"), "one target"),
    ],
)
def test_a_target_that_is_none_is_refused(arguments: tuple[str, ...], words: str) -> None:
    error = export("last", *arguments).exception
    assert words in f"{error} {getattr(error, 'hint', '')}"
    assert "secret" not in str(error)


def follower(runs: Path, target: str) -> threading.Thread:
    """Follows the run in a thread, as a process of its own does after a launch."""
    (parsed,) = parse_targets([target])
    thread = threading.Thread(target=follow_export, args=(runs, RUN.run_id, parsed), daemon=True)
    thread.start()
    return thread


def test_a_run_is_exported_while_it_is_running(tmp_path: Path) -> None:
    """Each piece of the samples comes while it is followed; what comes late is there at the end."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    running = msgspec.structs.replace(RUN, status="running", ended_s=None)
    directory = store_observed(tmp_path / "whole")
    following = make.store(tmp_path, RUN.run_id, plan=PLAN, run=running)
    lines = {node: list(directory.sample_lines(node)) for node in (0, 1)}
    textfile, board = tmp_path / "run.prom", tmp_path / "tb" / RUN.run_id
    with following.lock():
        followers = [follower(tmp_path, text) for text in (f"prometheus:{textfile}", f"tensorboard:{tmp_path / 'tb'}")]
        for node in (0, 1):
            data = b"".join(lines[node])
            half = len(data) // 2
            following.append_samples(node, "all.jsonl", data[:half])
        # Half a line of each is there: it counts once its end has come.
        wait_for(lambda: textfile.exists() and "multinode_nodes_step{" in textfile.read_text())
        now = metrics(textfile.read_text())["multinode_nodes_step"]
        assert 0 < now[("node", "box1"),] <= STEPS
        wait_for(lambda: any(path.stat().st_size > 1000 for path in board.glob("events*")))
        for node in (0, 1):
            data = b"".join(lines[node])
            following.append_samples(node, "all.jsonl", data[len(data) // 2 :])
        following.write("run.json", RUN)
        following.write_bytes("summary.json", (directory.path / "summary.json").read_bytes())
    for one in followers:
        one.join(DEADLINE_S)
        assert not one.is_alive()
    assert metrics(textfile.read_text())["multinode_summary_steps"] == {(): STEPS}
    events = EventAccumulator(str(board), size_guidance={"scalars": 0}).Reload()
    assert [one.step for one in events.Scalars("multinode/step_time_ms")] == list(range(1, STEPS + 1))


def test_metrics_are_served_to_this_machine_while_a_run_is_followed(tmp_path: Path) -> None:
    port = free_port()
    directory = store_observed(tmp_path)
    directory.write("run.json", msgspec.structs.replace(RUN, status="running", ended_s=None))
    with directory.lock():
        following = follower(tmp_path, f"metrics-port:{port}")
        found: dict[str, Any] = {}

        def ask() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    found.update(metrics(answer.read().decode()))
            except OSError:
                return False
            return "multinode_nodes_step" in found

        wait_for(ask)
        assert found["multinode_nodes_step"] == {(("node", name),): STEPS for name in ("box1", "box2")}
        assert found["multinode_nodes_net_out_gbit_per_s"].keys() == found["multinode_nodes_step"].keys()
        assert dict(next(iter(found["multinode_run_info"])))["status"] == "running"
        directory.write("run.json", RUN)
    following.join(DEADLINE_S)
    assert not following.is_alive()


def test_a_run_that_nobody_follows_is_exported_if_it_has_ended_and_refused_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    directory = store_observed(tmp_path)
    assert export("last", f"prometheus:{tmp_path}/a.prom", "--follow").exit_code == 0
    assert "multinode_summary" in (tmp_path / "a.prom").read_text()
    directory.write("run.json", msgspec.structs.replace(RUN, status="running", ended_s=None))
    followed, ended = (export("last", "csv:x", *arguments).exception for arguments in (("--follow",), ()))
    assert isinstance(followed, UsageError)
    assert isinstance(ended, UsageError)
    assert "no multinode process on this machine is following" in followed.message
    assert (followed.hint, ended.hint) == (
        f"multinode attach {RUN.run_id} --export csv:x",
        f"multinode export {RUN.run_id} --follow TARGET",
    )


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def attempt_of(run: Run, number: int) -> Run:
    return msgspec.structs.replace(run, run_id=f"{run.run_id}-{number}", part_of=run.run_id)


def test_each_attempt_of_a_restarted_run_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    for number in (1, 2):
        store_observed(tmp_path, attempt_of(RUN, number))
    make.store(tmp_path, RUN.run_id, run=msgspec.structs.replace(RUN, has_parts=True))
    assert export(RUN.run_id, f"csv:{tmp_path}/csv").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [f"{RUN.run_id}-{number}" for number in (1, 2)]

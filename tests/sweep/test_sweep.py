from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import ConnectError, Interrupted, MultinodeError, NodeFailed, UsageError
from multinode.findings.finding import message_of
from multinode.job.job import ScriptJob, TrainingJob
from multinode.job.planning import workers_of_nodes
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import GridRecord
from multinode.series.series import Resume, find_series
from multinode.sweep.measure import find_finished, sweep
from tests.golden import Golden, error_of
from tests.sweep.sweeping import BATCH, HOSTS, OUT_OF_MEMORY, Elsewhere, End, sweep_of

BATCHES: dict[str, tuple[Any, ...]] = {BATCH: (4, 1, 2)}
METHODS: dict[str, tuple[Any, ...]] = {BATCH: (1, 2, 4), "finetuning_type": ("lora", "full")}


def states_of(record: GridRecord) -> dict[str, str]:
    return {cell.cell.label: cell.state for cell in record.cells}


def said(nodes: Elsewhere, sweep_directory: Path) -> str:
    """What was said, a line each; SWEEP is the sweep's id."""
    return "".join(f"{line}\n" for line in nodes.said).replace(sweep_directory.name, "SWEEP")


def test_every_cell_is_a_run_of_its_own_and_the_sweep_is_one_too(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    swept = nodes.sweep(sweep_of(BATCHES, nodes=(1, 2), workers_per_node=(1, 2)))
    assert nodes.order == [
        f"{count}x{workers}-batch{batch}" for count in (1, 2) for workers in (1, 2) for batch in (1, 2, 4)
    ]
    assert set(states_of(swept.record).values()) == {"measured"}
    for cell in swept.record.cells:
        assert cell.run_ids == (f"{swept.directory.name}-{cell.cell.label}",)
        assert len(cell.took_s) == 1
    assert nodes.grid() == swept.record
    run = RunDirectory(swept.directory).read("run.json", Run)
    assert run is not None
    assert (run.kind, run.status, run.world_size, len(run.nodes)) == ("sweep", "succeeded", 4, 2)
    assert (swept.directory / "hostfile.txt").read_text() == HOSTS
    assert RunDirectory.open(tmp_path, "last").run_id == swept.directory.name
    assert swept.record.worker_batch == 8
    assert nodes.tables == 1


def test_unequal_nodes_train_with_their_own_slots(tmp_path: Path) -> None:
    asked = sweep_of({BATCH: (1,)}, nodes=(1, 2))
    hosts = HOSTS.replace("b slots=2", "b slots=1")
    launch = msgspec.structs.replace(asked.launch, cluster=parse_hostfile(hosts, "hosts"), hostfile=hosts)
    nodes = Elsewhere(tmp_path)
    swept = nodes.sweep(msgspec.structs.replace(asked, launch=launch))
    made = [workers_of_nodes(one.cluster, {}, one.workers_per_node) for one in nodes.launches]
    assert made == [(2,), (2, 1)]
    assert {one.environment.env["OMP_NUM_THREADS"] for one in nodes.launches} == {"1"}
    run = RunDirectory(swept.directory).read("run.json", Run)
    assert run is not None
    assert run.world_size == 3


def test_a_cell_is_trained_for_its_figures_alone_with_what_it_sets(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.sweep(sweep_of(BATCHES, steps=6, nodes=(2, 1), workers_per_node=(1, 2)))
    for what in nodes.launches:
        assert isinstance(what.job, TrainingJob)
        assert not what.job.keeps_output
        assert (what.job.config["max_steps"], what.job.config["save_strategy"]) == (8, "no")
        # One thread per worker in all cells, or a lone worker would compute otherwise.
        assert what.environment.env == {"OMP_NUM_THREADS": "1"}
        assert what.execute.kind == "sweep"
    first, last = nodes.launches[0], nodes.launches[-1]
    assert (len(first.cluster.nodes), first.workers_per_node) == (2, 1)
    assert (len(last.cluster.nodes), last.workers_per_node) == (1, 2)
    assert isinstance(first.job, TrainingJob)
    assert first.job.config[BATCH] == 1


def test_a_deepspeed_json_that_fixes_the_batch_fits_every_cell(tmp_path: Path) -> None:
    asked = sweep_of(BATCHES, workers_per_node=(2,))
    jobs = {
        label: msgspec.structs.replace(job, deepspeed_text='{"train_batch_size": 1}')
        for label, job in asked.jobs.items()
        if isinstance(job, TrainingJob)
    }
    nodes = Elsewhere(tmp_path)
    nodes.sweep(msgspec.structs.replace(asked, jobs=jobs))
    texts = [what.job.deepspeed_text for what in nodes.launches if isinstance(what.job, TrainingJob)]
    assert [json.loads(text or "") for text in texts] == [{"train_batch_size": batch * 2 * 2} for batch in (1, 2, 4)]


def test_out_of_memory_is_a_result_and_larger_batches_are_skipped(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path, lambda label: OUT_OF_MEMORY if label.endswith("full-batch2") else 10.0)
    swept = nodes.sweep(sweep_of(METHODS))
    assert nodes.order == [
        f"1-node-{cell}" for cell in ("lora-batch1", "lora-batch2", "lora-batch4", "full-batch1", "full-batch2")
    ]
    states = states_of(swept.record)
    assert states["1-node-full-batch2"] == "out_of_memory"
    assert states["1-node-full-batch4"] == "skipped"
    assert states["1-node-lora-batch4"] == "measured"
    cell = nodes.cell("1-node-full-batch2")
    assert (cell.out_of, message_of(cell.why)) == ("gpu", "a: out_of_gpu_memory happened")
    golden.check("out_of_memory.txt", said(nodes, swept.directory))


def test_a_cell_that_fails_does_not_end_the_sweep(tmp_path: Path) -> None:
    ends: dict[str, End] = {
        "1-node-batch1": 10.0,
        "1-node-batch2": "missing_file",
        "1-node-batch4": NodeFailed("a check found it", node="a"),
    }
    nodes = Elsewhere(tmp_path, lambda label: ends[label])
    swept = nodes.sweep(sweep_of(BATCHES))
    assert states_of(swept.record) == {
        "1-node-batch4": "failed",
        "1-node-batch1": "measured",
        "1-node-batch2": "failed",
    }
    assert message_of(nodes.cell("1-node-batch4").why) == "a: a check found it"
    assert message_of(nodes.cell("1-node-batch2").why) == "a: missing_file happened"


def test_a_run_without_a_step_that_counts_is_not_measured(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, lambda label: 0.0 if label.endswith("batch2") else 10.0)
    nodes.sweep(sweep_of(BATCHES))
    cell = nodes.cell("1-node-batch2")
    assert (cell.state, message_of(cell.why), cell.run_ids) == ("failed", "no step was recorded", ())


@pytest.mark.parametrize("error", [UsageError("no network in common"), NodeFailed("no python", node="a")])
def test_what_keeps_the_first_cells_from_beginning_ends_the_sweep(tmp_path: Path, error: MultinodeError) -> None:
    nodes = Elsewhere(tmp_path, lambda _: error)
    with pytest.raises(type(error)) as caught:
        nodes.sweep(sweep_of(BATCHES))
    assert caught.value is error
    assert len(nodes.order) == 2
    # It is no word against the cells: once it is fixed, they are measured.
    assert set(states_of(nodes.grid()).values()) == {"waiting"}
    with pytest.raises(type(error)):
        nodes.sweep(sweep_of({BATCH: (1,)}))
    assert len(nodes.order) == 3


def test_a_first_cell_that_is_refused_for_a_reason_of_its_own_fails_alone(tmp_path: Path) -> None:
    def end(label: str) -> End:
        return NodeFailed("bitsandbytes is missing", node="a") if "bits4" in label else 10.0

    nodes = Elsewhere(tmp_path, end)
    nodes.sweep(sweep_of({"quantization_bit": (4, 8)}))
    assert states_of(nodes.grid()) == {"1-node-bits4": "failed", "1-node-bits8": "measured"}
    assert message_of(nodes.cell("1-node-bits4").why) == "a: bitsandbytes is missing"


def test_first_cells_that_are_refused_for_different_reasons_do_not_end_it(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, lambda label: UsageError(f"{label} does not fit") if "batch4" not in label else 10.0)
    nodes.sweep(sweep_of(BATCHES))
    assert sorted(states_of(nodes.grid()).values()) == ["failed", "failed", "measured"]


def test_a_run_whose_directory_was_removed_is_made_again(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    swept = nodes.sweep(sweep_of(BATCHES))
    (gone,) = tmp_path.glob("*-batch2")
    shutil.rmtree(gone)
    assert find_finished(sweep_of(BATCHES), tmp_path, Resume()) is None
    nodes.order.clear()
    again = nodes.sweep(sweep_of(BATCHES))
    assert (again.directory, nodes.order) == (swept.directory, ["1-node-batch2"])
    assert set(states_of(nodes.grid()).values()) == {"measured"}


def test_a_node_that_cannot_be_reached_ends_it_at_the_second_cell_in_a_row(tmp_path: Path, golden: Golden) -> None:
    ends: dict[str, End] = {
        "1-node-lora-batch2": ConnectError("refused", node="a"),
        "1-node-lora-batch4": 10.0,
        "1-node-full-batch1": None,
        "1-node-full-batch2": ConnectError("refused", node="a"),
    }
    nodes = Elsewhere(tmp_path, lambda label: ends.get(label, 10.0))
    golden.check_errors("unreached", {"two cells in a row": error_of(nodes.sweep, sweep_of(METHODS))})
    states = states_of(nodes.grid())
    # One alone fails; the two are tried again by whoever goes on.
    assert states["1-node-lora-batch2"] == "failed"
    assert states["1-node-full-batch1"] == states["1-node-full-batch2"] == "waiting"
    nodes.ends = lambda _: 10.0
    nodes.order.clear()
    nodes.sweep(sweep_of(METHODS))
    assert nodes.order == ["1-node-full-batch1-try2", "1-node-full-batch2", "1-node-full-batch4"]


def test_a_node_that_cannot_be_reached_before_the_first_cell_ends_it_at_once(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.ends = lambda label: 10.0 if label.endswith("batch1") else MultinodeError("the disk here is full")
    assert error_of(nodes.sweep, sweep_of(BATCHES)).message == "the disk here is full"
    nodes.ends = lambda _: ConnectError("refused", node="a")
    with pytest.raises(ConnectError):
        nodes.sweep(sweep_of(BATCHES))
    assert states_of(nodes.grid()) == {
        "1-node-batch4": "waiting",
        "1-node-batch1": "measured",
        "1-node-batch2": "waiting",
    }


def test_what_ctrl_c_stops_is_measured_again_by_the_same_command(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path)

    def interrupt(label: str) -> End:
        if label.endswith("batch2"):
            nodes.stop.ask("SIGINT")
        return 10.0

    nodes.ends = interrupt
    interrupted = error_of(nodes.sweep, sweep_of(BATCHES))
    assert isinstance(interrupted, Interrupted)
    assert nodes.tables == 1
    run = RunDirectory.open(tmp_path, "last").read("run.json", Run)
    assert run is not None
    assert (run.kind, run.status) == ("sweep", "stopped")
    golden.check_errors("interrupted", {"Ctrl-C": interrupted}, Path(run.run_id))

    again = Elsewhere(tmp_path)
    swept = again.sweep(sweep_of(BATCHES))
    # Whoever was stopped keeps its run: an id is never used twice.
    assert again.order == ["1-node-batch2-try2", "1-node-batch4"]
    assert set(states_of(swept.record).values()) == {"measured"}
    golden.check("resumed.txt", said(again, swept.directory))


def test_a_run_that_ended_well_as_ctrl_c_came_is_kept(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.is_stopped_in_time = False

    def interrupt(_: str) -> End:
        nodes.stop.ask("SIGINT")
        return 10.0

    nodes.ends = interrupt
    with pytest.raises(Interrupted):
        nodes.sweep(sweep_of(BATCHES))
    assert (len(nodes.order), nodes.cell("1-node-batch1").state) == (1, "measured")


def test_a_sweep_that_is_finished_measures_nothing_again_unless_it_is_asked_to(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, lambda label: "missing_file" if label.endswith("batch4") else 10.0)
    first = nodes.sweep(sweep_of(BATCHES))
    assert find_finished(sweep_of(BATCHES), tmp_path, Resume()) == first
    nodes.order.clear()
    assert nodes.sweep(sweep_of(BATCHES)) == first
    assert nodes.order == []

    assert find_finished(sweep_of(BATCHES), tmp_path, Resume(retry_failed=True)) is None
    nodes.ends = lambda _: 12.0
    retried = nodes.sweep(sweep_of(BATCHES), retry_failed=True)
    assert nodes.order == ["1-node-batch4-try2"]
    assert retried.directory == first.directory
    assert nodes.cell("1-node-batch4").state == "measured"

    assert find_finished(sweep_of(BATCHES), tmp_path, Resume(anew=True)) is None
    nodes.order.clear()
    anew = nodes.sweep(sweep_of(BATCHES), anew=True)
    assert anew.directory != first.directory
    assert len(nodes.order) == 3


def test_another_command_is_another_sweep(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    first = nodes.sweep(sweep_of(BATCHES))
    for other in (sweep_of({BATCH: (1, 2)}), sweep_of(BATCHES, steps=60), sweep_of(BATCHES, repeats=2)):
        assert find_finished(other, tmp_path, Resume()) is None
    assert nodes.sweep(sweep_of(BATCHES, steps=60)).directory != first.directory


def test_a_grid_that_cannot_be_read_is_not_the_one_that_is_sought(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.sweep(sweep_of(BATCHES))
    (path,) = tmp_path.glob("*/grid.json")
    path.write_text('{"cut": ')
    assert find_finished(sweep_of(BATCHES), tmp_path, Resume()) is None


def test_repeats_are_made_in_turns_and_a_cell_keeps_all_its_runs(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    swept = nodes.sweep(sweep_of({BATCH: (1, 2)}, repeats=2))
    assert nodes.order == ["1-node-batch1-1", "1-node-batch2-1", "1-node-batch2-2", "1-node-batch1-2"]
    name = swept.directory.name
    assert swept.record.cells[0].run_ids == (f"{name}-1-node-batch1-1", f"{name}-1-node-batch1-2")


def test_a_repeat_that_went_well_is_told_so_whatever_became_of_an_earlier_one(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path, lambda label: "missing_file" if label.endswith("-2") else 10.0)
    swept = nodes.sweep(sweep_of({BATCH: (1,)}, repeats=3))
    golden.check("repeats.txt", said(nodes, swept.directory))


def test_a_script_has_a_grid_of_nodes_and_workers(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    swept = nodes.sweep(sweep_of({}, job=ScriptJob(argv=("train.py",)), nodes=(1, 2), workers_per_node=(1, 2)))
    assert nodes.order == ["1x1", "1x2", "2x1", "2x2"]
    assert swept.record.worker_batch is None


def test_a_run_that_was_stopped_at_its_time_is_measured(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.sweep(sweep_of(BATCHES, minutes=2.0))
    job = nodes.launches[0].job
    assert isinstance(job, TrainingJob)
    # Its own end must not come first.
    assert job.config["max_steps"] == 1_000_000


def test_two_processes_never_make_one_sweep(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.ends = lambda label: 10.0 if label.endswith("batch1") else MultinodeError("the disk here is full")
    with pytest.raises(MultinodeError):
        nodes.sweep(sweep_of(BATCHES))
    (path,) = tmp_path.glob("*/grid.json")
    with RunDirectory(path.parent).lock():
        golden.check_errors(
            "two_processes", {"the second": error_of(nodes.sweep, sweep_of(BATCHES))}, Path(path.parent.name)
        )


def test_a_table_that_cannot_be_made_is_no_word_against_what_was_measured(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path)

    def conclude(*_: object) -> None:
        raise MultinodeError("no table")

    swept = sweep(sweep_of(BATCHES), nodes.context, Resume(), conclude, nodes.measure)
    assert set(states_of(swept.record).values()) == {"measured"}
    golden.check("no_table.txt", said(nodes, swept.directory))


class Removed(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """A directory of which a run was removed just after it had been listed."""

    def glob(self, pattern: str, **options: Any) -> Iterator[Path]:
        yield self / pattern.replace("*", "gone")
        yield from super().glob(pattern, **options)


def test_a_run_that_is_removed_while_a_sweep_is_sought_hides_no_other(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    swept = nodes.sweep(sweep_of(BATCHES))
    found = find_series(Removed(tmp_path), swept.record.fingerprint)
    assert found is not None
    assert found[0].path == swept.directory

"""The profiler's window in real workers: what is recorded, what comes of a training that ends or profiles itself."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multinode.profile.trace import TraceEvents, read_trace, view_traces
from multinode.stats.unknown import known
from tests.warm import WarmProcess, free_port

DEADLINE_S = 600.0
# What `hooks` does; here the script itself says when a step has ended.
SET_UP = """
import os, sys
sys.path.insert(0, os.environ["AGENT"])
from multinode_agent import worker
import multinode_agent.worker.hooks
recorder = worker.recorder.Recorder(os.environ["MULTINODE_SAMPLES"], int(os.environ["RANK"]))
guard = worker.guard.Guard(recorder)
steps = worker.steps.Steps(recorder, guard)
sys.meta_path.insert(0, worker.guard.AfterImport(worker.trace.hooks(steps, guard)))
"""
TORCH = """
import torch
model = torch.nn.Linear(64, 64)
def train(count):
    for _ in range(count):
        model.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        steps.step("optimizer")
"""
TRAINER = """
class TrainerCallback:
    pass

class Trainer:
    def __init__(self):
        self.callbacks = []
    def add_callback(self, callback):
        self.callbacks.append(callback())
    def train(self, steps, done, total):
        class State: global_step, max_steps = done, total
        for callback in self.callbacks:
            callback.on_train_begin(None, State, None)
        for number in range(done + 1, total + 1):
            steps.step("trainer", step=number)
        for callback in self.callbacks:
            callback.on_train_end(None, State, None)
"""
DDP = """
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
for _ in range(8):
    ddp(torch.ones(8, 256)).sum().backward()
    steps.step("optimizer")
dist.destroy_process_group()
"""


class Traced:
    """Runs scripts as a worker of a run does."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self.folder, self.archive = folder, archive
        self.traces = folder / "traces"
        self.samples = folder / "samples"
        self.samples.mkdir(parents=True)
        (folder / "modules" / "transformers").mkdir(parents=True)
        (folder / "modules" / "transformers" / "__init__.py").touch()
        (folder / "modules" / "transformers" / "trainer.py").write_text(TRAINER)

    def start(self, script: str, window: object, environ: Mapping[str, str] | None = None) -> WarmProcess:
        """Start a worker; rank 0 unless `environ` says otherwise."""
        return WarmProcess(
            ["-c", SET_UP + script],
            {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(self.folder / "modules"),
                "AGENT": str(self.archive),
                "RANK": "0",
                "LOCAL_RANK": "0",
                "OMP_NUM_THREADS": "1",
                "MULTINODE_SAMPLES": str(self.samples),
                "MULTINODE_RUN_DIR": str(self.folder),
                "MULTINODE_TRACE": json.dumps(window) if window is not None else "",
                **(environ or {}),
            },
        )

    def run(self, script: str, window: object, *, said: str = "") -> str:
        """Run a worker, which must end well and say nothing of its own but `said`; its output."""
        worker = self.start(script, window)
        status = worker.wait(DEADLINE_S)
        output, errors = worker.output()
        assert status == 0, errors
        assert said in errors if said else not errors, errors
        return output

    def record(self, rank: int = 0) -> dict[str, Any]:
        """The one record of a trace."""
        lines = (self.samples / f"rank-{rank}.jsonl").read_text().splitlines()
        (record,) = [one for one in map(json.loads, lines) if one["kind"] == "trace"]
        assert isinstance(record, dict)
        return record

    def read(self, rank: int = 0) -> TraceEvents:
        """The trace, as the controller reads it."""
        return read_trace((self.traces / f"rank-{rank}.json.gz").read_bytes())

    def steps(self) -> list[int]:
        """Of the trace, which are in it from mark to mark."""
        return [step.step for step in self.read().steps]


@pytest.fixture
def traced(tmp_path: Path, archive: Path) -> Traced:
    return Traced(tmp_path, archive)


def window(steps: int, after: int, *ranks: int) -> dict[str, Any]:
    return {"steps": steps, "after": after, "ranks": list(ranks or (0,))}


@pytest.mark.torch
def test_the_asked_steps_are_recorded_after_one_that_pays_for_the_start(traced: Traced) -> None:
    traced.run(TORCH + "train(9)", window(3, 2))
    record = traced.record()
    assert (record["rank"], record["first_step"], record["last_step"]) == (0, 4, 6)
    assert record["file"] == "rank-0.json.gz"
    assert record["disturbed_to"] >= 7
    assert traced.steps() == [4, 5, 6]
    assert traced.read().computing
    assert [path.name for path in traced.traces.iterdir()] == ["rank-0.json.gz"]
    assert stat.S_IMODE(traced.traces.stat().st_mode) == 0o700
    assert stat.S_IMODE((traced.traces / "rank-0.json.gz").stat().st_mode) == 0o600


# As torch 2.11 has it at every start.
WARNING = """
import torch.profiler, warnings
prepare = torch.profiler.profile.prepare_trace
def warning(self):
    warnings.warn("Warning: Profiler clears events at the end of each cycle. ...", UserWarning, stacklevel=2)
    prepare(self)
torch.profiler.profile.prepare_trace = warning
"""


@pytest.mark.torch
def test_what_torch_warns_of_when_it_starts_to_record_is_kept_out_of_the_jobs_log(traced: Traced) -> None:
    script = f"{TORCH}{WARNING}train(9)\nwarnings.warn('the user\\'s own', UserWarning)"
    traced.run(script, window(3, 2), said="UserWarning: the user's own")
    assert traced.steps() == [4, 5, 6]
    again = Traced(traced.folder / "again", traced.archive)
    again.run(f"{TORCH}{WARNING}train(9)", window(3, 2))


@pytest.mark.parametrize("asked", [None, window(3, 2, 1)])
def test_a_worker_that_is_not_to_be_traced_does_nothing(traced: Traced, asked: object) -> None:
    traced.run("for _ in range(9): steps.step('optimizer')", asked)
    assert not traced.traces.exists()
    assert '"trace"' not in (traced.samples / "rank-0.jsonl").read_text()


@pytest.mark.parametrize("asked", [[1], {"steps": 3}, {"steps": "x", "after": 1, "ranks": [0]}])
def test_a_request_that_cannot_be_read_is_told_and_stops_nothing(traced: Traced, asked: object) -> None:
    assert traced.run("print('trained')", asked, said="tracing failed") == "trained\n"


@pytest.mark.torch
def test_a_short_training_of_the_trainer_is_traced_earlier_and_to_its_end(traced: Traced) -> None:
    traced.run("from transformers.trainer import Trainer\nimport torch\nTrainer().train(steps, 0, 9)", window(20, 10))
    assert traced.steps() == [5, 6, 7, 8, 9]


@pytest.mark.torch
def test_a_resumed_training_counts_the_steps_that_it_has_left(traced: Traced) -> None:
    script = "from transformers.trainer import Trainer\nimport torch\nTrainer().train(steps, 500, 530)"
    traced.run(script, window(2, 4))
    assert traced.steps() == [506, 507]


@pytest.mark.torch
def test_a_training_that_ends_in_the_window_gives_the_steps_there_were(traced: Traced) -> None:
    traced.run(TORCH + "train(6)", window(50, 2))
    assert traced.steps() == [4, 5, 6]
    assert traced.record()["last_step"] == 6


@pytest.mark.torch
def test_a_training_that_dies_in_the_window_gives_them_too(traced: Traced) -> None:
    worker = traced.start(TORCH + "train(6)\nraise SystemExit(3)", window(50, 2))
    assert worker.wait(DEADLINE_S) == 3
    assert traced.steps() == [4, 5, 6]


FAILING = {
    "ended too early": (TORCH + "train(3)", "the run ended before a complete step was recorded"),
    "too short": (
        "from transformers.trainer import Trainer\nimport torch\nTrainer().train(steps, 0, 2)",
        "the run is too short for a trace: it has 2 steps",
    ),
    "no torch": ("for _ in range(9): steps.step('optimizer')", "torch was not imported"),
    "no Kineto": (
        TORCH + "torch.autograd.kineto_available = lambda: False\ntrain(9)",
        "this torch was built without its profiler (Kineto)",
    ),
    "profiles itself": (
        TORCH + "with torch.profiler.profile() as own: train(9)\nassert own.events()",
        "the training code uses its own profiler",
    ),
    "starts to profile itself": (
        TORCH + "train(4)\nwith torch.profiler.profile() as own: train(4)\n"
        "assert sum(event.name == 'aten::linear' for event in own.events()) == 4\n"
        "assert not torch.autograd._profiler_enabled()",
        "the training code started its own profiler",
    ),
    "cannot write": (
        TORCH + "open(os.path.join(os.environ['MULTINODE_RUN_DIR'], 'traces'), 'w').close()\ntrain(9)",
        "FileExistsError",
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize(("script", "reason"), FAILING.values(), ids=FAILING)
def test_what_comes_to_nothing_says_why_and_leaves_the_training_alone(traced: Traced, script: str, reason: str) -> None:
    assert traced.run(script + "\nprint('trained')", window(3, 2)) == "trained\n"
    record = traced.record()
    assert record["error"].startswith(reason)
    assert "file" not in record
    assert not traced.traces.is_dir() or not list(traced.traces.iterdir())


@pytest.mark.torch
def test_the_training_may_profile_itself_once_the_window_is_over(traced: Traced) -> None:
    script = TORCH + "train(8)\nwith torch.profiler.profile() as own: train(2)\nassert own.events()"
    traced.run(script, window(2, 2))
    assert traced.steps() == [4, 5]


@pytest.mark.torch
def test_two_workers_with_gloo_show_their_all_reduces_with_sizes(traced: Traced) -> None:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    workers = [
        traced.start(TORCH + DDP, window(3, 2, 0, 1), {**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    statuses = [worker.wait(DEADLINE_S) for worker in workers]
    assert statuses == [0, 0], [worker.output() for worker in workers]
    view = view_traces({rank: traced.read(rank) for rank in (0, 1)}, 2)
    assert [(worker.rank, worker.steps) for worker in view.workers] == [(0, 3), (1, 3)]
    assert sum(view.message_bytes) == (256 * 256 + 256) * 4
    assert known(view.busbw_gb_per_s) > 0
    assert [worker for worker in view.workers if 0 < worker.comm_ms < worker.step_ms] == list(view.workers)

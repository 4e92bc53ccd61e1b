"""The hooks in a real interpreter, standing first on PYTHONPATH inside a built archive, as a worker meets them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from .instrumented import Worker

# Stand-ins with the parts of the libraries that the hooks touch.
TRANSFORMERS = """
class TrainerCallback:
    pass

class Trainer:
    def __init__(self):
        self.callbacks = []
    def add_callback(self, callback):
        self.callbacks.append(callback())
    def train(self, steps, losses, evaluate=None):
        class Args: train_batch_size, gradient_accumulation_steps = 4, 2
        class State: global_step, max_steps = 0, steps
        for callback in self.callbacks:
            callback.on_train_begin(Args, State, None)
        for loss in losses:
            State.global_step += 1
            for callback in self.callbacks:
                callback.on_step_end(Args, State, None)
                callback.on_log(Args, State, None, logs={"loss": loss})
            if evaluate is not None:
                metrics = {"eval_loss": evaluate()}
                for callback in self.callbacks:
                    callback.on_log(Args, State, None, logs=metrics)
                    callback.on_evaluate(Args, State, None, metrics=metrics)
        for callback in self.callbacks:
            callback.on_log(Args, State, None, logs={"train_runtime": 2.0, "train_samples_per_second": 12.0})
"""
DEEPSPEED = """
class DeepSpeedEngine:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.global_steps = self.micro_steps = 0
    def train_micro_batch_size_per_gpu(self):
        return 4
    def gradient_accumulation_steps(self):
        return 2
    def step(self):
        self.micro_steps += 1
        if self.micro_steps % 2 == 0:
            self.optimizer.step()
            self.optimizer.step()
            self.global_steps += 1
        return "stepped"
"""
OPTIMIZER = """
hooks = []
def register_optimizer_step_post_hook(hook):
    hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
TORCH_LOOP = """
import torch
model = torch.nn.Linear(4, 1)
main, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
for _ in range(5):
    main.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    main.step()
    other.step()
"""


@pytest.fixture
def worker(tmp_path: Path, archive: Path) -> Worker:
    return Worker(tmp_path, archive)


@pytest.fixture
def warm(tmp_path: Path, archive: Path) -> Worker:
    return Worker(tmp_path, archive, warm=True)


@pytest.mark.torch
def test_a_plain_training_loop_is_counted_by_its_first_optimizer(worker: Worker) -> None:
    done = worker.run(TORCH_LOOP)
    assert (done.returncode, done.stderr) == (0, "")
    (began,) = worker.records("worker")
    assert {record["schema"] for record in worker.records()} == {1}
    assert (began["rank"], began["local_rank"], began["world_size"], began["source"]) == (3, 1, 4, "optimizer")
    assert began["versions"]["torch"]
    steps = worker.records("step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["step_time_us"] is None for step in steps] == [True, False, False, False, False]
    times_ns = [step["mono_ns"] for step in steps]
    assert [step["step_time_us"] for step in steps[1:]] == [
        (after - before) / 1000 for before, after in itertools.pairwise(times_ns)
    ]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MULTINODE_ATTEMPT": "2"}, "3.0 cpu\n"),
        ({"MULTINODE_ATTEMPT": "2", "MULTINODE_FAILURES_ONLY": "1"}, "3.0 cpu\n"),
        ({}, "don't know how to restore data location of torch.storage.UntypedStorage (tagged with cpu:1)\n"),
    ],
)
def test_a_run_with_restarts_loads_to_a_cpu_that_has_a_number(
    warm: Worker, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    done = warm.run(
        "import torch\n"
        f"path = {str(tmp_path / 'optimizer.pt')!r}\n"
        "torch.save({'exp_avg': torch.arange(3.0)}, path)\n"
        "try:\n"
        "    loaded = torch.load(path, map_location=torch.device('cpu', 1), weights_only=True)['exp_avg']\n"
        "    print(loaded.sum().item(), loaded.device)\n"
        # Of torch 2.4 an error of pickle's, with torch's own at its end.
        "except Exception as error:\n"
        "    print('don\\'t know' + str(error).rpartition('don\\'t know')[2].partition('\\n')[0])\n",
        **changes,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", said)


@pytest.mark.torch
def test_when_the_first_optimizer_is_gone_another_is_counted(warm: Worker) -> None:
    done = warm.run(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "for _ in range(3):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    optimizer.step()\n"
        "    optimizer.step()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [step["step"] for step in warm.records("step")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.torch
def test_an_optimizer_that_steps_no_more_gives_way_to_one_that_does(warm: Worker) -> None:
    done = warm.run(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "warm_up, main = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))\n"
        "warm_up.step()\n"
        "for _ in range(100): main.step()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(warm.records("step")) == 1 + 50


def test_a_trainer_tells_its_steps_samples_losses_and_its_own_figures(worker: Worker) -> None:
    worker.module("transformers.trainer", TRANSFORMERS)
    done = worker.run("from transformers.trainer import Trainer\nTrainer().train(10, [2.5, float('nan')])\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert [record["source"] for record in worker.records("worker")] == ["trainer"]
    steps = worker.records("step")
    assert [(step["step"], step["total_steps"], step["samples"]) for step in steps] == [(1, 10, 8), (2, 10, 8)]
    assert steps[0]["step_time_us"] > 0
    assert [(loss["step"], loss["loss"]) for loss in worker.records("loss")] == [(1, 2.5), (2, None)]
    (end,) = worker.records("train_end")
    assert (end["train_runtime_s"], end["train_samples_per_s"]) == (2.0, 12.0)


def test_an_evaluation_tells_its_loss_and_is_in_no_steps_time(worker: Worker) -> None:
    worker.module("transformers.trainer", TRANSFORMERS)
    done = worker.run(
        "import time\n"
        "from transformers.trainer import Trainer\n"
        "losses = iter([1.5, float('inf')])\n"
        "def evaluate():\n"
        "    print(time.monotonic_ns())\n"
        "    return next(losses)\n"
        "Trainer().train(2, [2.0, 1.0], evaluate)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [(one["step"], one["loss"]) for one in worker.records("evaluation")] == [(1, 1.5), (2, None)]
    evaluated_ns = int(done.stdout.split()[0])
    second = worker.records("step")[1]
    assert 0 < second["step_time_us"] < (second["mono_ns"] - evaluated_ns) / 1000


def test_deepspeed_is_counted_by_optimizer_steps_and_not_by_micro_batches(worker: Worker) -> None:
    worker.module("deepspeed.runtime.engine", DEEPSPEED)
    worker.module("torch.optim.optimizer", OPTIMIZER)
    done = worker.run(
        "from torch.optim.optimizer import Optimizer\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "engine = DeepSpeedEngine(Optimizer())\n"
        "for _ in range(6):\n"
        "    assert engine.step() == 'stepped'\n"
    )
    # The stand-in is no model: what else there is to tell of one is not told.
    assert done.returncode == 0
    assert [record["source"] for record in worker.records("worker")] == ["deepspeed"]
    assert [(step["step"], step["samples"]) for step in worker.records("step")] == [(1, 8), (2, 8), (3, 8)]


def test_the_exception_that_ends_a_worker_is_recorded_and_printed_as_ever(worker: Worker) -> None:
    done = worker.run("def load():\n    raise ValueError('bad data')\nload()\n")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: bad data\n")
    (record,) = worker.records()
    assert (record["kind"], record["rank"], record["type"], record["message"]) == (
        "exception",
        3,
        "ValueError",
        "bad data",
    )
    assert "in load" in record["traceback"]


def test_an_exception_that_cannot_be_printed_is_the_users_all_the_same(worker: Worker) -> None:
    done = worker.run("class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd\n")
    assert done.returncode == 1
    assert "Odd" in done.stderr


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MULTINODE_SAMPLES"])
def test_a_process_that_is_no_worker_is_left_alone(worker: Worker, missing: str) -> None:
    script = "import sys\nprint('multinode_agent.worker.hooks' in sys.modules)\nraise SystemExit(3)\n"
    done = worker.run(script, **{missing: None})
    assert (done.returncode, done.stdout, done.stderr) == (3, "False\n", "")
    assert list(worker.samples.iterdir()) == []


@pytest.mark.parametrize(
    "start",
    [
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'raise ValueError'])\n",
        "import os\npid = os.fork()\nif pid == 0: raise ValueError\nos.waitpid(pid, 0)\n",
    ],
)
def test_what_a_worker_starts_records_nothing(worker: Worker, start: str) -> None:
    done = worker.run(start)
    assert done.returncode == 0
    assert "ValueError" in done.stderr
    assert list(worker.samples.iterdir()) == []


@pytest.mark.parametrize("local_rank", ["1", None])
def test_a_sitecustomize_of_the_users_own_still_runs(worker: Worker, local_rank: str | None) -> None:
    worker.module("sitecustomize", "import builtins\nbuiltins.theirs = 'ran'\n")
    assert worker.run("print(theirs)", LOCAL_RANK=local_rank).stdout == "ran\n"


def test_a_broken_sitecustomize_of_the_users_own_is_told_as_python_does(worker: Worker) -> None:
    worker.module("sitecustomize", "1 / 0\n")
    done = worker.run("print('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert "ZeroDivisionError" in done.stderr


def test_nothing_of_the_users_is_imported_early(worker: Worker) -> None:
    for name in ("torch.optim.optimizer", "transformers.trainer", "deepspeed.runtime.engine"):
        worker.module(name, "raise AssertionError('imported early')\n")
    done = worker.run(
        "import sys\nprint([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("missing", "No such file or directory"),
        ("a file", "Not a directory"),
        ("a full device", "No space left on device"),
    ],
)
def test_a_recorder_that_cannot_write_says_so_once_and_disturbs_nothing(
    worker: Worker, trouble: str, reason: str
) -> None:
    worker.module("transformers.trainer", TRANSFORMERS)
    folder = worker.samples / "none"
    if trouble == "a file":
        folder.write_text("")
    elif trouble == "a full device":
        folder.mkdir()
        (folder / "rank-3.jsonl").symlink_to("/dev/full")
    done = worker.run(
        "from transformers.trainer import Trainer\nTrainer().train(2, [1.0, 1.0])\nprint('trained')\n",
        MULTINODE_SAMPLES=str(folder),
    )
    path = folder / "rank-3.jsonl"
    told = f"multinode: records are lost, {path} cannot be written: {reason}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", told)


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("transformers.trainer", "class TrainerCallback: pass\n"),
        ("torch.optim.optimizer", "class Optimizer: pass\n"),
        ("deepspeed.runtime.engine", "class DeepSpeedEngine: pass\n"),
    ],
)
def test_a_library_of_another_shape_is_told_once_by_each_hook(worker: Worker, name: str, library: str) -> None:
    worker.module(name, library)
    done = worker.run(f"import {name}\nprint('trained')\n")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    lines = done.stderr.splitlines()
    assert len(lines) == len(set(lines)) > 0
    for line in lines:
        assert line.startswith("multinode: ")
        assert "failed and is skipped: AttributeError" in line


@pytest.mark.parametrize("changes", [{"RANK": "first"}, {"WORLD_SIZE": "many"}])
def test_odd_variables_stop_no_training(worker: Worker, changes: dict[str, str | None]) -> None:
    worker.module("transformers.trainer", TRANSFORMERS)
    script = "from transformers.trainer import Trainer\nTrainer().train(1, [1.0])\nprint('trained')\n"
    done = worker.run(script, **changes)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "multinode: " in done.stderr


def test_a_worker_marks_the_signal_on_which_it_shows_its_stacks(worker: Worker, tmp_path: Path) -> None:
    script = """
import os, signal, sys, json
mark = json.load(open(sys.argv[1] + "/stacks/rank-3.json"))
assert mark["pid"] == os.getpid()
assert mark["signal"] not in (signal.SIGUSR1, signal.SIGUSR2)
def load(): os.kill(os.getpid(), mark["signal"])
load()
print("trained")
"""
    done = worker.run(f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{script}", MULTINODE_RUN_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert "in load" in (tmp_path / "stacks" / "rank-3.txt").read_text()


def test_a_signal_that_is_taken_already_is_left_to_who_took_it(worker: Worker, tmp_path: Path) -> None:
    # The parent ignores it, and what is ignored stays so across exec.
    script = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGRTMIN + 12, signal.SIG_IGN)
env = {{**os.environ, "MULTINODE_RUN_DIR": {str(tmp_path)!r}, "LOCAL_RANK": "1"}}
sys.exit(subprocess.run([sys.executable, "-c", "print('trained')"], env=env).returncode)
"""
    done = worker.run(script, LOCAL_RANK=None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert not (tmp_path / "stacks" / "rank-3.json").exists()


def test_a_run_directory_that_cannot_be_written_is_told_in_one_line_and_trains_on(
    worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "stacks").write_text("")
    done = worker.run("print('trained')", MULTINODE_RUN_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("multinode: register failed and is skipped: FileExistsError")

"""A training under the instrumentation ends as it would without: same exit, same output, same weights, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.node.localnode import wait_until
from tests.warm import WarmProcess

from .instrumented import DEADLINE_S, Worker

pytestmark = pytest.mark.torch

# Trains a wrapped model on a loader, and says what it came to.
TRAINING = """
import hashlib, os, tempfile, torch, torch.distributed

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, index): return torch.full((3,), float(index))

def train(model, workers=0, context=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for rows in torch.utils.data.DataLoader(
        Rows(), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context
    ):
        model(rows).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer

def wrapped():
    torch.manual_seed(7)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout()))

def tell(model):
    flat = torch.cat([value.detach().flatten() for value in model.parameters()])
    print(hashlib.sha256(flat.numpy().tobytes()).hexdigest(), torch.rand(1).item(), flush=True)

def main(**settings):
    store = torch.distributed.FileStore(tempfile.mkdtemp() + "/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = wrapped()
    train(model, **settings)
    tell(model)
    torch.distributed.destroy_process_group()
"""
PLAIN = f"{TRAINING}\nif __name__ == '__main__': main()\n"
# What a worker of ours calls while it trains, by module and class.
PARTS = (
    ("steps", "Steps", "step"),
    ("steps", "Steps", "begin"),
    ("phases", "PhaseClock", "enter"),
    ("phases", "PhaseClock", "unwind"),
    ("phases", "PhaseClock", "within"),
    ("phases", "PhaseClock", "take_us"),
    ("batches", "Batches", "begin"),
    ("batches", "Batches", "end"),
    ("batches", "Batches", "__call__"),
    ("nics", "NicMeter", "__call__"),
    ("recorder", "Recorder", "write"),
    ("recorder", "Recorder", "flush"),
)


@pytest.fixture
def worker(tmp_path: Path, archive: Path) -> Worker:
    return Worker(tmp_path, archive, warm=True)


@functools.cache
def run_alone(script: str, archive: Path) -> tuple[int, str]:
    """Exit status and stdout of a script without the instrumentation; each is run once only."""
    with tempfile.TemporaryDirectory() as folder:
        done = Worker(Path(folder), archive, warm=True).run(script, MULTINODE_SAMPLES=None, LOCAL_RANK="0")
    assert "multinode: " not in done.stderr
    return done.returncode, done.stdout


def run_both(worker: Worker, script: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run it with the instrumentation and without; what differs fails the test."""
    watched = worker.run(script, MULTINODE_IFNAMES="lo", LOCAL_RANK="0", **changes)
    alone = run_alone(script, worker.archive)
    assert (watched.returncode, watched.stdout) == alone, watched.stderr
    return watched


def test_a_training_is_the_same_bit_for_bit_and_recorded(worker: Worker) -> None:
    done = run_both(worker, PLAIN)
    assert (done.returncode, len(done.stdout.split())) == (0, 2)
    assert "multinode: " not in done.stderr
    steps = worker.records("step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert (step["micro_steps"], step["samples"]) == (1, 4)
        assert set(step["phases_us"]) >= {"data", "forward", "backward", "optimizer"}
    assert steps[0]["peak_memory_bytes"] > 1_000_000
    assert set(steps[0]["nics"]["lo"]) == {"tx_bytes", "rx_bytes", "tx_packets", "rx_packets"}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[1]}.{part[2]}")
def test_whatever_of_ours_raises_is_told_and_the_training_goes_on(worker: Worker, part: tuple[str, str, str]) -> None:
    module, owner, name = f"multinode_agent.worker.{part[0]}", *part[1:]
    worker.module(
        "sitecustomize",
        "import sys\n"
        "def fail(*_, **__): raise RuntimeError('made to fail')\n"
        f"if {module!r} in sys.modules: setattr(sys.modules[{module!r}].{owner}, {name!r}, fail)\n",
    )
    done = run_both(worker, PLAIN)
    assert (done.returncode, len(done.stdout.split())) == (0, 2)
    assert "made to fail" in done.stderr


def test_records_for_which_there_is_no_room_are_lost_and_nothing_else(worker: Worker) -> None:
    folder = worker.samples / "none"
    folder.mkdir()
    # A file that may not grow beyond this size is as good as a disk that has no more; the last line is cut in half.
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    script = f"{limit}resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n{PLAIN}"
    done = run_both(worker, script, MULTINODE_SAMPLES=str(folder))
    assert done.returncode == 0
    assert done.stderr.count("records are lost") == 1
    assert whole_lines(folder / "rank-3.jsonl")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_record_nothing_and_end_as_ever(worker: Worker, context: str) -> None:
    done = run_both(worker, f"{TRAINING}\nif __name__ == '__main__': main(workers=2, context={context!r})\n")
    assert done.returncode == 0
    assert [step["step"] for step in worker.records("step")] == [1, 2, 3]


def test_a_process_that_a_worker_forks_records_nothing_of_its_own_training(worker: Worker) -> None:
    done = run_both(
        worker,
        f"""{TRAINING}
model = torch.nn.Linear(3, 3)
torch.nn.init.ones_(model.weight)
train(model)
child = os.fork()
if child == 0:
    train(model)
    raise SystemExit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    )
    assert (done.returncode, done.stdout) == (0, "5\n")
    assert [step["step"] for step in worker.records("step")] == [1, 2, 3]


def test_a_worker_that_never_steps_records_nothing(worker: Worker) -> None:
    done = run_both(worker, f"{TRAINING}\ntorch.manual_seed(0)\ntell(torch.nn.Linear(3, 3))\nraise SystemExit(3)\n")
    assert done.returncode == 3
    assert list(worker.samples.iterdir()) == []


def test_of_a_worker_that_is_killed_what_was_recorded_before_is_whole(worker: Worker) -> None:
    script = worker.modules / "killed.py"
    script.write_text(
        f"{TRAINING}\nmodel = torch.nn.Linear(3, 3)\n"
        "for number in range(10**9):\n    train(model)\n    if number == 2: print('trains', flush=True)\n"
    )
    process = WarmProcess([script], worker.environ(LOCAL_RANK="0"))
    wait_until(lambda: process.output() == ("trains\n", ""))
    # What was recorded is written now and then, not with each step.
    samples = worker.samples / "rank-3.jsonl"
    wait_until(lambda: samples.exists() and samples.read_bytes().count(b"\n") > 1)
    process.kill()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    recorded = whole_lines(worker.samples / "rank-3.jsonl")
    assert recorded > 1
    # Started again, it goes on behind whatever was left.
    with (worker.samples / "rank-3.jsonl").open("ab") as file:
        file.write(b'{"kind":"st')
    assert worker.run(PLAIN).returncode == 0
    torn, *added = (worker.samples / "rank-3.jsonl").read_bytes().splitlines()[recorded:]
    assert torn == b'{"kind":"st'
    assert [record["kind"] for record in map(json.loads, added)].count("step") == 3


def test_an_exception_that_ends_a_training_is_recorded_behind_its_steps(worker: Worker) -> None:
    done = run_both(worker, f"{TRAINING}\ntrain(torch.nn.Linear(3, 3))\nraise ValueError('theirs')\n")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: theirs\n")
    assert [record["kind"] for record in worker.records()][-4:] == ["step", "step", "step", "exception"]


RECORDER = """
import os, sys, time
sys.path.insert(0, os.environ["AGENT"])
from multinode_agent import worker
import multinode_agent.worker.hooks
recorder = worker.recorder.Recorder(os.environ["MULTINODE_SAMPLES"], 3, most_queued=5)
"""


# A fifo that nobody reads is a disk that hangs: it takes two of these records.
BURST = f"""{RECORDER}
for number in range(100): recorder.write("burst", {{"number": number, "fill": "x" * 30000}})
"""


def test_a_burst_is_cut_and_counted(worker: Worker) -> None:
    os.mkfifo(worker.samples / "rank-3.jsonl")
    done = worker.run(
        f"""{BURST}
data = b""
with open(os.environ["MULTINODE_SAMPLES"] + "/rank-3.jsonl", "rb", buffering=0) as disk:
    while recorder._queue.qsize():
        data += disk.read(65536)
    recorder.write("last", {{}})
    while b'"last"' not in data:
        data += disk.read(65536)
sys.stdout.write(data.decode())
""",
        LOCAL_RANK=None,
        AGENT=str(worker.archive),
    )
    assert (done.returncode, done.stderr) == (0, "")
    *kept, note, last = map(json.loads, done.stdout.splitlines())
    assert 5 <= len(kept) < 20
    assert [record["number"] for record in kept] == list(range(len(kept)))
    assert note["kind"] == "note"
    assert note["message"].startswith(f"{100 - len(kept)} records were dropped")
    assert last["kind"] == "last"


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_a_training(worker: Worker) -> None:
    os.mkfifo(worker.samples / "rank-3.jsonl")
    done = worker.run(BURST, LOCAL_RANK=None, AGENT=str(worker.archive))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_record_that_is_no_json_is_lost_alone(worker: Worker) -> None:
    done = worker.run(
        f"""{RECORDER}
class Odd:
    def __repr__(self): return "Odd()"
for value in (1.5, Odd(), float("nan"), {{1: 2}}, 2.5): recorder.write("loss", {{"loss": value}})
""",
        LOCAL_RANK=None,
        AGENT=str(worker.archive),
    )
    assert done.returncode == 0
    assert [record["loss"] for record in worker.records()] == [1.5, {"1": 2}, 2.5]
    assert "a loss record is lost" in done.stderr


def whole_lines(path: Path) -> int:
    """How many lines there are, all of which must be whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return len([json.loads(line) for line in data.splitlines()])

"""A torch without torch: a GPU that is a clock, and a torchrun that starts workers and waits for them."""

from __future__ import annotations

from pathlib import Path

# Every call puts the clock on by two milliseconds, or by GPU_CALL_MS (compute and launch, which a replayed graph
# does without), and is written down in the file `calls` beside the package.
_GPU = """
import os
import time
import types

__version__ = "2.8.0"
precision, clock_ms = "highest", 0.0
CALL_MS, LAUNCH_MS = (float(one) for one in os.environ.get("GPU_CALL_MS", "2.0 0.0").split())


class Tensor:
    def __init__(self, dtype="float32"):
        self.dtype = dtype

    def to(self, dtype):
        return Tensor(dtype)

    def copy_(self, source, non_blocking=False):
        _work(f"copy {non_blocking}")


captured = None


class CUDAGraph:
    def replay(self):
        global clock_ms
        clock_ms += CALL_MS * len(self.calls)
        _note(f"replay {len(self.calls)}")


class graph:
    def __init__(self, graph):
        self.graph = graph

    def __enter__(self):
        global captured
        if os.environ.get("NO_GRAPHS"):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        captured = self.graph.calls = []

    def __exit__(self, *_):
        global captured
        captured = None


def _work(what):
    global clock_ms
    if captured is not None:
        captured.append(what)
        return
    clock_ms += CALL_MS + LAUNCH_MS
    _note(what)


def _note(what):
    if CALL_MS < 1.0:
        # Writing would take longer than the call.
        return
    with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "calls"), "a") as file:
        file.write(what + "\\n")


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.ms = clock_ms

    def elapsed_time(self, other):
        return other.ms - self.ms


def device(kind, index=None):
    return types.SimpleNamespace(type=kind, index=index)


def set_float32_matmul_precision(wanted):
    global precision
    precision = wanted


def mm(left, right, out):
    _work(f"mm {left.dtype} {precision}")


def add(first, second, alpha, out):
    _work("add")


def randn(*sizes, device):
    return Tensor()


def empty(*sizes, device=None, pin_memory=False):
    return Tensor()


zeros = empty
float32, float16, bfloat16 = "float32", "float16", "bfloat16"


def empty_like(other):
    return Tensor(other.dtype)


def get_num_threads():
    return 1


def _synchronize(device=None):
    # A GPU that computes is waited for.
    if CALL_MS + LAUNCH_MS >= 1.0:
        time.sleep(0.002)


version = types.SimpleNamespace(hip=None, cuda="12.8")
cuda = types.SimpleNamespace(
    Event=Event,
    CUDAGraph=CUDAGraph,
    graph=graph,
    is_available=lambda: True,
    device_count=lambda: 1,
    set_device=lambda device: None,
    get_device_capability=lambda device: (8, 0),
    get_device_properties=lambda device: types.SimpleNamespace(
        name="A GPU that is not there", major=8, minor=0, total_memory=40 << 30
    ),
    mem_get_info=lambda device: (8 << 30, 40 << 30),
    synchronize=_synchronize,
    empty_cache=lambda: None,
)
"""
# Static rendezvous alone: the rank of a worker follows from that of its node.
_RUN = """
import os, subprocess, sys
options, command = {}, sys.argv[1:]
while command[0].startswith("--"):
    name, _, value = command.pop(0).partition("=")
    options[name] = value
count = int(options["--nproc-per-node"])
workers = []
for local_rank in range(count):
    ranks = {"LOCAL_RANK": local_rank, "RANK": int(options["--node-rank"]) * count + local_rank,
             "LOCAL_WORLD_SIZE": count, "WORLD_SIZE": int(options["--nnodes"]) * count}
    environ = os.environ | {name: str(value) for name, value in ranks.items()}
    workers.append(subprocess.Popen([sys.executable, *command], env=environ))
sys.exit(max(worker.wait() for worker in workers))
"""


def put_torch(folder: Path) -> Path:
    """Put it into a folder, which is to stand on PYTHONPATH."""
    modules = {"torch/__init__.py": _GPU, "torch/distributed/__init__.py": "", "torch/distributed/run.py": _RUN}
    for name, text in modules.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder

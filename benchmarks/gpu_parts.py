"""Parts of the GPU report that are no tests: each writes its section, in Markdown, to the file that $SECTION names.

Raw records stay in the directory that $KEEP names. Without a GPU the parts of the day with known truth rehearse: a
sleeping host is the GPU, gloo is NCCL, and everything is shorter. `benchmarks/gpu_lab.py` has what they share.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import gpu_lab
from known_truth import STRATEGIES
from provoked import PROVOKED

from multinode.bench.measure import bench
from multinode.job.job import ScriptJob
from multinode.launch.context import ExecuteOptions, RunContext
from multinode.launch.launch import launch
from multinode.records.benchmark import DeviceTest
from multinode.results.run_page import load_report, report_markdown
from multinode.transport.local import LocalTransport
from tests.gpu.one_gpu import TRAIN, launch_of

_QUERY_S = 60
# No GPU holds a batch of this many rows of 4096 numbers.
_TOO_LARGE = 1 << 28
_TORCH = """
import time
began = time.monotonic()
import torch
took_s = time.monotonic() - began
print(torch.version.cuda)
print(".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None)
print(f"{took_s:.1f}")
"""


def main() -> int:
    """The exit code: 1 where the part did not do what it should."""
    (name,) = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="multinode-gpu-") as folder:
        text, succeeded = _PARTS[name](Path(folder))
    Path(os.environ["SECTION"]).write_text(text)
    return 0 if succeeded else 1


def _machine(_: Path) -> tuple[str, bool]:
    """Versions, and what makes a first start slow or a figure differ."""
    rows = list(_rows())
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]), True


def _rows() -> Iterator[tuple[str, object]]:
    fields = "name,memory.total,memory.used,driver_version,mig.mode.current"
    for line in _ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines():
        yield "GPU", line
    yield "Python", platform.python_version()
    yield "kernel", platform.release()
    cuda, nccl, import_s = (_ask(sys.executable, "-c", _TORCH).splitlines() + [None] * 3)[:3]
    yield "CUDA of torch", cuda
    yield "NCCL of torch", nccl
    yield "seconds to import torch", import_s
    began = time.monotonic()
    socket.getfqdn()
    yield "seconds to look up the machine's own name", f"{time.monotonic() - began:.1f}"
    yield from _memory()
    for name in ("multinode", "torch", "transformers", "deepspeed", "accelerate", "llamafactory", "nvidia-ml-py"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _memory() -> Iterator[tuple[str, object]]:
    """By NVML's two ways, of the first GPU: the second is nvidia-smi's."""
    try:
        import pynvml  # noqa: PLC0415 - not everywhere

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        first = pynvml.nvmlDeviceGetMemoryInfo(handle)
        second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except Exception as error:  # noqa: BLE001 - one row of the page, whatever the driver or the module lacks
        yield "memory by NVML", f"unknown: {error}"
        return
    yield "MiB in use by NVML, versions 1 and 2", f"{first.used >> 20}, {second.used >> 20}"


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()[-200:]}"


def _bench(home: Path) -> tuple[str, bool]:
    execute = ExecuteOptions(kind="bench", lease_s=60.0)
    with _Runs(home) as context:
        bench(launch_of(DeviceTest(), nodes=1, execute=execute, run_id="bench"), ("alone",), context)
        return report_markdown(load_report(context.runs, ["bench"])), True


def _out_of_memory(home: Path) -> tuple[str, bool]:
    job = ScriptJob(argv=(str(TRAIN), "--batch", str(_TOO_LARGE), "--width", "4096"))
    with _Runs(home) as context:
        failure = launch(launch_of(job, run_id="oom"), context).run.first_failure
    if failure is None:
        return "a batch that no GPU holds has been trained", False
    if failure.kind != "out_of_gpu_memory":
        return f"told as {failure.kind}: {failure.message}", False
    return f"`{failure.message}`\n\n{failure.hint}", True


def _allows(_: Path) -> tuple[str, bool]:
    """Tools, and what the kernel lets this process make."""
    rows = [(name, gpu_lab.can(*command)) for name, command in gpu_lab.ABILITIES.items()]
    text = "\n".join(["| | |", "|---|---|", *(f"| {name} | {answer} |" for name, answer in rows)])
    return f"{text}\n\nComputation: {gpu_lab.computation()}.", True


def _truth(home: Path) -> tuple[str, bool]:
    """Exposed communication as told, beside what the step would be shorter with a network that takes no time."""
    rows, skipped = [], []
    with gpu_lab.Lab(home) as lab:
        for strategy in STRATEGIES:
            reason = gpu_lab.why_not(strategy)
            if reason is not None:
                skipped.append(f"- {strategy}: skipped, {reason}.")
                continue
            slow, fast = (
                lab.train(rate, "--strategy", strategy, name=f"{strategy}-{rate}") for rate in ("1gbit", "none")
            )
            rows.append(gpu_lab.truth_row(strategy, slow, fast))
    head = ["strategy", "step (ms)", "compute told (ms)", "exposed and wait told (ms)", "known (ms)", "error"]
    worst = max((abs(row.error) for row in rows), default=1.0)
    passed = worst <= gpu_lab.WITHIN or gpu_lab.REHEARSES
    return "\n".join([*gpu_lab.table(head, [row.cells for row in rows]), "", *skipped, gpu_lab.ARITHMETIC]), passed


def _bytes(_: Path) -> tuple[str, bool]:
    """Of the runs of the part before: the veth of each node beside calls and formula."""
    rows, worst = [], 0.0
    for name, summary in gpu_lab.kept("truth"):
        told = summary["comm"]["bytes_per_step"]
        calls, expected, nic = (told[key] for key in ("calls", "expected", "nic"))
        apart = nic / expected - 1 if nic and expected else float("nan")
        worst = max(worst, abs(apart))
        said = "; ".join(summary["comm"]["explained"])
        cells = [gpu_lab.megabytes(value) for value in (calls, expected, nic)]
        rows.append([name, *cells, f"{apart:+.1%}", said])
    head = ["run", "calls (MB)", "formula (MB)", "veth (MB)", "apart", "told"]
    if not rows:
        return "no run of the part `truth` is kept: run it first with the same --output", False
    return "\n".join(gpu_lab.table(head, rows)), worst <= gpu_lab.BYTES_WITHIN or gpu_lab.REHEARSES


def _network(home: Path) -> tuple[str, bool]:
    """nccl-test between the nodes at two rates, beside what raw TCP carries."""
    rows, passed = [], True
    with gpu_lab.Lab(home) as lab:
        for rate in ("1gbit", "10gbit"):
            busbw, tcp = lab.nccl_test(rate)
            share = busbw / tcp
            passed = passed and abs(share - 1) <= gpu_lab.NETWORK_WITHIN
            rows.append([rate, f"{tcp:.3f}", f"{busbw:.3f}", f"{share - 1:+.1%}"])
    head = ["rate", "raw TCP (GB/s)", "best busbw (GB/s)", "apart"]
    return "\n".join(gpu_lab.table(head, rows)), passed or gpu_lab.REHEARSES


def _main_job(home: Path) -> tuple[str, bool]:
    """LLaMA-Factory's LoRA SFT: predicted from two one-node trainings at once, then measured at each rate."""
    rates = ("1gbit",) if gpu_lab.REHEARSES else ("1gbit", "2.5gbit", "10gbit")
    with gpu_lab.Lab(home) as lab:
        alone = lab.both_alone()
        # A rehearsal predicts from the two alone.
        together = [] if gpu_lab.REHEARSES else [lab.fine_tune("none", nodes=2, name="together")]
        predicted = {rate: lab.predict(rate, (*alone, *together)) for rate in rates}
        measured = {rate: lab.fine_tune(rate, nodes=2, name=f"at-{rate}") for rate in rates}
    rows, inside = [], 0
    for rate in rates:
        (value, low, high), step_ms = predicted[rate], measured[rate].step_ms
        inside += low <= step_ms <= high
        rows.append([rate, f"{value:.0f} ({low:.0f}-{high:.0f})", f"{step_ms:.0f}", f"{value / step_ms - 1:+.0%}"])
    head = ["rate", "predicted step (ms)", "measured (ms)", "error"]
    each = ", ".join(f"{run.step_ms:.0f}" for run in alone)
    text = f"Two one-node trainings at once: {each} ms per step.\n\n" + "\n".join(gpu_lab.table(head, rows))
    return text, inside >= min(2, len(rates)) or gpu_lab.REHEARSES


def _overhead(home: Path) -> tuple[str, bool]:
    """The same training with and without hooks, in turns, by its own clock."""
    rows, passed = [], True
    limits = {"bound by the GPU": (4096, 0.01), "bound by the host": (256, 0.03)}
    with gpu_lab.Lab(home) as lab:
        for name, (width, limit) in limits.items():
            with_ms, without_ms = lab.in_turns(str(TRAIN), "--width", str(width // (8 if gpu_lab.REHEARSES else 1)))
            cost = with_ms / without_ms - 1
            passed = passed and cost < limit
            rows.append([name, f"{without_ms:.2f}", f"{with_ms:.2f}", f"{cost:+.1%}", f"< {limit:.0%}"])
    head = ["training", "without hooks (ms)", "with (ms)", "cost", "limit"]
    return "\n".join(gpu_lab.table(head, rows)), passed or gpu_lab.REHEARSES


def _windows(home: Path) -> tuple[str, bool]:
    """Counters and trace of one training."""
    rows = []
    with gpu_lab.Lab(home) as lab:
        for strategy in ("ddp", "fsdp2") if gpu_lab.REHEARSES else ("ddp", "fsdp2", "zero3-overlap"):
            run = lab.train("1gbit", "--strategy", strategy, name=f"{strategy}-traced", options=("--trace",))
            rows.append([strategy, run.summary["trace"]["agreement"] if run.summary["trace"] else "no window"])
    return "\n".join(gpu_lab.table(["strategy", "told"], rows)), True


def _launch_bound(home: Path) -> tuple[str, bool]:
    """Where the host begins to set the pace: one rank, wider and wider."""
    rows = []
    widths = (64, 512) if gpu_lab.REHEARSES else (256, 512, 1024, 2048, 4096, 8192)
    with gpu_lab.Lab(home, nodes=1) as lab:
        for width in widths:
            run = lab.launch(str(TRAIN), "--width", str(width), "--steps", "30", name=f"width-{width}")
            passes = run.summary["split"]["passes"] or {}
            both = [f"{passes[key]:.2f}" if key in passes else "-" for key in ("host_ms", "gpu_ms")]
            rows.append([str(width), f"{run.step_ms:.2f}", *both, run.summary["bottleneck"]["kind"]])
    head = ["width", "step (ms)", "passes on the host (ms)", "on the GPU (ms)", "told"]
    return "\n".join(gpu_lab.table(head, rows)), True


def _clock(home: Path) -> tuple[str, bool]:
    """Bench with clock and watts beside its figures, for one second a test and for ten."""
    texts = []
    rehearsed = DeviceTest(kinds=("matmul", "memory"), dtypes=("fp32",), sizes=(512,), seconds=0.2)
    for test in (rehearsed,) if gpu_lab.REHEARSES else (DeviceTest(seconds=1.0), DeviceTest(seconds=10.0)):
        run_id = f"clock-{test.seconds:g}"
        execute = ExecuteOptions(kind="bench", lease_s=60.0)
        with _Runs(home) as context:
            bench(launch_of(test, nodes=1, execute=execute, run_id=run_id), ("alone",), context)
            texts.append(report_markdown(load_report(context.runs, [run_id])))
    return "\n\n".join(texts), True


def _new_failures(home: Path) -> tuple[str, bool]:
    """What no other part provokes; each is told by its cause."""
    rows = []
    truth = gpu_lab.KNOWN_TRUTH
    with gpu_lab.Lab(home) as lab:
        asleep = ("fsdp2",) if gpu_lab.REHEARSES else ("fsdp2", "zero3-overlap")
        for strategy in asleep:
            words = (truth, "--strategy", strategy, "--steps", "60", "--asleep-rank", "1")
            rows.append([f"rank 1 asleep in {strategy}", lab.failure(*words)])
        wrong = "NCCL_SOCKET_IFNAME" if not gpu_lab.REHEARSES else "GLOO_SOCKET_IFNAME"
        rows.append(["wrong interface", lab.failure(truth, options=("--env", f"{wrong}=nowhere0"))])
        rows.append(["a worker that exits", lab.failure(truth, "--exits-rank", "1")])
        cut_s = 3 if gpu_lab.REHEARSES else 20
        rows.append([f"link cut for {cut_s} s", lab.failure(truth, "--steps", "60", cut_s=cut_s)])
    return "\n".join(gpu_lab.table(["failure", "told"], rows)), all(told for _, told in rows)


def _llamafactory(home: Path) -> tuple[str, bool]:
    """LLaMA-Factory's trainings on two ranks: LoRA, and ZeRO-2 and ZeRO-3 with overlap."""
    rows = []
    with gpu_lab.Lab(home) as lab:
        for name, options in gpu_lab.TRAININGS.items():
            run = lab.fine_tune("none", nodes=2, name=name, options=options)
            mean = run.summary["split"]["mean"] or {}
            exposed = mean.get("exposed_ms")
            share = f"{exposed / mean['step_ms']:.0%}" if exposed is not None else "-"
            rows.append([name, f"{run.step_ms:.0f}", share, run.summary["split"]["rule"].partition(";")[0]])
    head = ["training", "step (ms)", "exposed", "exposed from"]
    return "\n".join(gpu_lab.table(head, rows)), True


def _failures(home: Path) -> tuple[str, bool]:
    """The failures whose logs are kept (tests/gpu/h100/failures.jsonl), provoked anew: are they told as then?"""
    rows, skipped = [], []
    for case, provoked in PROVOKED.items():
        if provoked.needs_gpu and gpu_lab.REHEARSES:
            skipped.append(case)
            continue
        rows.append([case, gpu_lab.told_of(gpu_lab.provoke(home / f"{case}.py", provoked.script))])
    left_out = f"\n\nWithout a GPU not provoked: {', '.join(skipped)}." if skipped else ""
    return "\n".join(gpu_lab.table(["failure", "told"], rows)) + left_out, all(told for _, told in rows)


class _Runs:
    """A context whose nodes and runs are below a directory."""

    def __init__(self, home: Path) -> None:
        self._context = RunContext(LocalTransport(home), home / "runs")

    def __enter__(self) -> RunContext:
        return self._context

    def __exit__(self, *_: object) -> None:
        self._context.agent.close()


_PARTS: dict[str, Callable[[Path], tuple[str, bool]]] = {
    "machine": _machine,
    "bench": _bench,
    "oom": _out_of_memory,
    "allows": _allows,
    "truth": _truth,
    "bytes": _bytes,
    "network": _network,
    "main": _main_job,
    "overhead": _overhead,
    "windows": _windows,
    "launch-bound": _launch_bound,
    "clock": _clock,
    "new-failures": _new_failures,
    "llamafactory": _llamafactory,
    "failures": _failures,
}


if __name__ == "__main__":
    sys.exit(main())

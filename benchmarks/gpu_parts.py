"""Parts of the GPU report that are no tests: each writes its section, in Markdown, to the file that $SECTION names.

Raw records stay in the directory that $KEEP names. Without a GPU the parts of the day with known truth rehearse: a
sleeping host is the GPU, gloo is NCCL, and everything is shorter. What cannot run here is skipped, with the reason.
`benchmarks/gpu_lab.py` has what they share.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import fine_tunings
import gpu_lab
from gpu_sharing import Skipped
from known_truth import STRATEGIES
from provoked import PROVOKED
from step_arithmetic import Layers, known_step, size_at

from multinode.bench.measure import bench
from multinode.job.job import ScriptJob
from multinode.launch.context import ExecuteOptions, RunContext
from multinode.launch.launch import launch
from multinode.records.benchmark import DeviceTest
from multinode.results.run_page import load_report, report_markdown
from multinode.transport.local import LocalTransport
from tests.gpu.one_gpu import TRAIN, launch_of

_QUERY_S = 60
# How a rank breaks step (tests/lab/desync_train.py), and what is to be said of it.
_DESYNCS = {
    "skip": "^rank 2 (called|has not entered) ",
    "operation": "^rank 2 called broadcast .* all_reduce #",
    "size": "^rank 2 called all_reduce of 8192 elements .* all_reduce of 8 elements ",
    "sleep": "^rank 2 has not entered all_reduce #",
    "end": "^rank 2 has not entered all_gather #.* of group pair",
    "group": "^rank 2 has not entered all_gather #.* of group pair",
}
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
    # A part whose time is up takes its lab down, and ends its daemon of MPS.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="multinode-gpu-") as folder:
        try:
            text, succeeded = _PARTS[name](Path(folder))
        except Skipped as reason:
            text, succeeded = f"Skipped: {str(reason).rstrip('.')}.", True
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
    needs = f"The lab needs {', '.join(gpu_lab.LAB_NEEDS)}; a link with a rate needs tbf."
    return f"{text}\n\n{needs} Parts that lack something are skipped with the reason.", True


def _truth(home: Path) -> tuple[str, bool]:
    """Compute time and exposed communication as told, beside arithmetic: cycles, and bytes over the link's rate."""
    rows, skipped = [], []
    with gpu_lab.Lab(home) as lab:
        for strategy in STRATEGIES:
            reason = gpu_lab.why_not(strategy)
            if reason is not None:
                skipped.append(f"- {strategy}: skipped, {reason}.")
                continue
            for rate_gbit_per_s in (1.0,) if gpu_lab.REHEARSES else (1.0, 10.0):
                layers = size_at(Layers(), rate_gbit_per_s)
                words = ("--strategy", strategy, "--layer-bytes", str(layers.size_bytes))
                name = f"{strategy}-{rate_gbit_per_s:g}gbit"
                run = lab.train(f"{rate_gbit_per_s:g}gbit", *words, name=name)
                known = known_step(strategy, rate_gbit_per_s, layers, streams=not gpu_lab.REHEARSES)
                rows.append(gpu_lab.truth_row(name, run, known))
        sharing = lab.sharing.words
    head = ["training", "step known (ms)", "by its own clock", "told"]
    head += [f"{part} {what}" for part in ("compute", "exposed and wait") for what in ("known (ms)", "told", "error")]
    about = (
        f"Here {sharing}. Known by arithmetic (`benchmarks/step_arithmetic.py`): a pass is cycles that "
        "each process has calibrated, a collective is its bytes over what the link's rate leaves for TCP. At 10 Gbit/s "
        f"layers are ten times as large. Bound: {gpu_lab.WITHIN:.0%} for each part."
    )
    judged = [row.judged for row in rows]
    return "\n".join([*gpu_lab.table([*head, "bound"], judged), "", *skipped, "", about]), gpu_lab.passed(rows)


def _bytes(_: Path) -> tuple[str, bool]:
    """Of the runs of the part before: the veth of each node beside calls and formula."""
    rows = [gpu_lab.bytes_row(name, summary) for name, summary in gpu_lab.kept("truth")]
    if not rows:
        raise Skipped("no run of the part `truth` is kept; run that first, with this --output")
    head = ["run", "calls (MB)", "formula (MB)", "veth (MB)", "apart", "told", "bound"]
    return "\n".join(gpu_lab.table(head, [row.judged for row in rows])), gpu_lab.passed(rows)


def _network(home: Path) -> tuple[str, bool]:
    """nccl-test between the nodes at two rates, beside what raw TCP carries."""
    rows = []
    with gpu_lab.Lab(home) as lab:
        for rate in ("1gbit", "10gbit"):
            busbw, tcp = lab.nccl_test(rate)
            apart = busbw / tcp - 1
            cells = [rate, f"{tcp:.3f}", f"{busbw:.3f}", f"{apart:+.1%}"]
            rows.append(gpu_lab.Row(cells, abs(apart) <= gpu_lab.NETWORK_WITHIN))
    head = ["rate", "raw TCP (GB/s)", "best busbw (GB/s)", "apart", "bound"]
    return "\n".join(gpu_lab.table(head, [row.judged for row in rows])), gpu_lab.passed(rows)


def _main_job(home: Path) -> tuple[str, bool]:
    """LLaMA-Factory's LoRA SFT with ZeRO-2: predicted from two one-node trainings at once, then contrasted."""
    rates = ("1gbit",) if gpu_lab.REHEARSES else ("1gbit", "2.5gbit", "10gbit")
    shape, steps = ("tiny", 12) if gpu_lab.REHEARSES else ("h100", 30)
    job = fine_tunings.main_job(home, fine_tunings.assets(shape))
    with gpu_lab.Lab(home) as lab:
        limited = fine_tunings.with_settings(*job, max_steps=steps)
        lab.compile_deepspeed()
        alone = lab.both_alone(*limited)
        together = lab.fine_tune("none", *limited, name="together")
        predicted = {rate: lab.predict(rate, (*alone, together)) for rate in rates}
        measured = {rate: lab.contrast(rate, *job)["candidate"]["step_time_ms"]["value"] for rate in rates}
        sharing = lab.sharing.words
    rows = []
    for rate in rates:
        value, step_ms = predicted[rate], measured[rate]
        told, error = "unknown", "unknown"
        if value is not None:
            told, error = f"{value.value:.0f} ({value.low:.0f}-{value.high:.0f})", f"{value.value / step_ms - 1:+.0%}"
        keeps = value is not None and value.low <= step_ms <= value.high
        rows.append(gpu_lab.Row([rate, told, f"{step_ms:.0f}", error], keeps))
    head = ["rate", "predicted step (ms)", "measured by contrast (ms)", "error", "bound"]
    each = ", ".join(f"{run.step_ms:.0f}" for run in alone)
    about = (
        f"Here {sharing}. Predicted from two one-node trainings at once ({each} ms per step) and one of "
        f"both nodes on an unshaped link ({together.step_ms:.0f} ms). Times compare runs on this machine alone. Bound: "
        "the printed interval, at 2 of 3 rates."
    )
    inside = sum(row.keeps for row in rows) >= min(2, len(rates))
    text = "\n".join([*gpu_lab.table(head, [row.judged for row in rows]), "", about])
    return text, inside or gpu_lab.REHEARSES


def _overhead(home: Path) -> tuple[str, bool]:
    """Trainings with and without hooks, in pairs, by their own clock."""
    rows = []
    # Name, strategy, width of a layer, pairs of runs, and the limit.
    trainings = (
        [("DDP", "ddp", 512, 2, 0.03), ("FSDP 2", "fsdp2", 256, 2, 0.03)]
        if gpu_lab.REHEARSES
        else [
            ("DDP, bound by the GPU", "ddp", 4096, 3, 0.01),
            ("DDP, bound by the host", "ddp", 256, 3, 0.03),
            ("FSDP 2, bound by the host", "fsdp2", 256, 2, 0.03),
            ("ZeRO-3, bound by the host", "zero3", 256, 2, 0.03),
        ]
    )
    with gpu_lab.Lab(home, shaped=False) as lab:
        for name, strategy, width, pairs, limit in trainings:
            words = (str(TRAIN), "--strategy", strategy, "--width", str(width))
            rows.append(gpu_lab.cost_row(name, lab.in_turns(*words, pairs=pairs), limit))
    head = ["training", "without hooks (ms)", "with (ms)", "cost (95% interval)", "limit", "bound"]
    about = "Pairs of runs in turns; the interval of their ratios is that of `multinode/stats/estimate.py`."
    return "\n".join([*gpu_lab.table(head, [row.judged for row in rows]), "", about]), gpu_lab.passed(rows)


def _compared(trace: dict[str, Any] | None) -> str:
    """How the window compares with the counters."""
    return "no window" if trace is None else " ".join(finding["message"] for finding in trace["findings"])


def _windows(home: Path) -> tuple[str, bool]:
    """Counters and trace of one training."""
    rows = []
    with gpu_lab.Lab(home) as lab:
        for strategy in ("ddp", "fsdp2") if gpu_lab.REHEARSES else ("ddp", "fsdp2", "zero3-overlap"):
            run = lab.train("1gbit", "--strategy", strategy, name=f"{strategy}-traced", options=("--trace",))
            rows.append([strategy, _compared(run.summary["trace"])])
    return "\n".join(gpu_lab.table(["strategy", "told"], rows)), True


def _launch_bound(home: Path) -> tuple[str, bool]:
    """Where the host begins to set the pace: one rank, wider and wider."""
    rows = []
    widths = (64, 512) if gpu_lab.REHEARSES else (256, 512, 1024, 2048, 4096, 8192)
    with gpu_lab.Lab(home, nodes=1, shaped=False) as lab:
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
    """What no other part provokes; each has to be told by its worker and cause."""
    rows = []
    truth = ("--", gpu_lab.KNOWN_TRUTH, "--steps", "60")
    hang = ("--hang-timeout", "15", "--on-hang", "stop")
    interface = "GLOO_SOCKET_IFNAME" if gpu_lab.REHEARSES else "NCCL_SOCKET_IFNAME"
    with gpu_lab.Lab(home, shaped=False, honest=False) as lab:
        for strategy in ("fsdp2",) if gpu_lab.REHEARSES else ("fsdp2", "zero3-overlap"):
            run = lab.fail(*truth, "--strategy", strategy, "--asleep-rank", "1", options=hang)
            expected = gpu_lab.Expected((1,), "fall_asleep")
            rows.append(gpu_lab.failure_row(f"rank 1 asleep in {strategy}", run, expected))
        run = lab.fail(*truth, options=("--env", f"{interface}=nowhere0"))
        rows.append(gpu_lab.failure_row("wrong interface", run, gpu_lab.Expected((0, 1), "nowhere0")))
        run = lab.fail(*truth, "--exits-rank", "1")
        rows.append(gpu_lab.failure_row("a worker that exits", run, gpu_lab.Expected((1,), "exited with code 3")))
        lost_s = 8.0 if gpu_lab.REHEARSES else 20.0
        trains = str(home / "trains")
        waits = ("--hang-timeout", f"{lost_s / 2:g}", "--on-hang", "report")
        steps = ("--", gpu_lab.KNOWN_TRUTH, "--steps", "60", "--trains-file", trains)
        run = lab.lose_packets(*steps, options=waits, file=trains, lost_s=lost_s)
        # One rank may have launched a collective less: the stall names it, and the training goes on.
        expected = gpu_lab.Expected((None, 0, 1), "wait|collective", "succeeded")
        rows.append(gpu_lab.failure_row(f"all packets lost for {lost_s:g} s ({gpu_lab.loss_by()})", run, expected))
        rows.append(_restart(home, lab))
    head = ["failure", "ended", "rank", "told", "expected", "bound"]
    return "\n".join(gpu_lab.table(head, [row.judged for row in rows])), all(row.keeps for row in rows)


def _desyncs(home: Path) -> tuple[str, bool]:
    """One of four ranks breaks step: is it named with its collective?"""
    rows = []
    script = str(gpu_lab.ROOT / "tests" / "lab" / "desync_train.py")
    hang = ("--hang-timeout", "40", "--on-hang", "stop")
    with gpu_lab.Lab(home, nodes=4, shaped=False, honest=False) as lab:
        for kind, says in _DESYNCS.items():
            run = lab.fail("--", script, kind, "2", "2", options=hang)
            rows.append(gpu_lab.failure_row(kind, run, gpu_lab.Expected((2,), says)))
    head = ["rank 2 breaks step by", "ended", "rank", "told", "expected", "bound"]
    return "\n".join(gpu_lab.table(head, [row.judged for row in rows])), all(row.keeps for row in rows)


def _restart(home: Path, lab: gpu_lab.Lab) -> gpu_lab.Row:
    """A worker is killed after its first checkpoint; the second attempt goes on from one, to the end."""
    fine_tunings.assets("tiny")
    output = home / "checkpoints"
    settings = {"max_steps": 16, "save_strategy": "steps", "save_steps": 5, "output_dir": output}
    job = fine_tunings.with_settings("configs/tiny_sft.yaml", **settings)
    run = lab.restart(*job, file=f"{output}/checkpoint-5/trainer_state.json")
    attempts = run["attempts"]
    words = "; ".join(
        f"from {attempt['checkpoint'] or 'scratch'}: {attempt['status']} at step {attempt['last_step']}"
        for attempt in attempts
    )
    keeps = (
        run["status"] == "succeeded"
        and [attempt["status"] for attempt in attempts] == ["failed", "succeeded"]
        and (attempts[0]["first_failure"] or {}).get("rank") == 1
        and attempts[1]["checkpoint"] is not None
        and attempts[1]["last_step"] == settings["max_steps"]
    )
    return gpu_lab.Row(
        ["rank 1 killed, restart", run["status"], "1", words, "2 attempts, the second from a checkpoint"], keeps
    )


def _llamafactory(home: Path) -> tuple[str, bool]:
    """The trainings of benchmarks/h100.md on two ranks, each with a window of its trace."""
    rows = []
    shape, steps, width = ("tiny", 14, 256) if gpu_lab.REHEARSES else ("h100", 24, 2048)
    traced = ("--trace", "3")
    with gpu_lab.Lab(home, shaped=False, honest=False) as lab:
        lab.compile_deepspeed()
        runs = [
            (name, lab.fine_tune("none", *traced, *job, name=name))
            for name, job in fine_tunings.h100_rows(home, fine_tunings.assets(shape), steps, bf16=not gpu_lab.REHEARSES)
        ]
        words = (str(TRAIN), "--compile", "--width", str(width), "--depth", "5", "--steps", str(steps))
        name = "torch.compile of DDP, autocast"
        runs.append((name, lab.launch(*words, name=name, options=traced)))
        sharing = lab.sharing.words
    for name, run in runs:
        mean = run.summary["split"]["mean"]
        exposed = gpu_lab.known(mean.get("exposed_ms"))
        share = f"{exposed / mean['step_ms']:.0%}" if exposed is not None else "-"
        agreement = _compared(run.summary["trace"])
        sent = run.summary["comm"]["bytes_per_step"]["calls"]
        rule = run.summary["split"]["rule"].partition(";")[0]
        rows.append([name, f"{run.step_ms:.0f}", share, gpu_lab.megabytes(gpu_lab.known(sent)), rule, agreement])
    head = ["training", "step (ms)", "exposed", "sent by the calls (MB)", "exposed from", "counters and trace"]
    return "\n".join([*gpu_lab.table(head, rows), "", f"Here {sharing}."]), True


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
    "desyncs": _desyncs,
    "llamafactory": _llamafactory,
    "failures": _failures,
}


if __name__ == "__main__":
    sys.exit(main())

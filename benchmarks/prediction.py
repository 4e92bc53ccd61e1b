"""How far predictions are off: trainings on several nodes, each predicted from one node and nccl-test alone.

A series is a training on so many nodes. It has one run on one node, from which all its cells are predicted, and for
each gradient accumulation one run on the nodes, whose link gets one rate after the other: a cell is the mean step at a
rate, beginning with the second whole step after the change. A cell is predicted from the run on one node and

- `own`: the nccl-test of so many nodes at that rate;
- `carried`: the nccl-test of two nodes at 1 Gbit/s, whatever the cell's nodes and rate.

No prediction sees a training on several nodes: these are stored apart. What is predicted is computed anew from the
stored runs whenever the report is printed, so that a change of the model can be held against a grid that is measured.

The lab's nodes share the processors of one machine, which nodes of a cluster do not. Two rules, fixed before the grid
was measured, keep that out of the judgement:

- The run on one node has as many workers as the series has nodes: then as many share the processors.
- Where computation overlaps communication (`overlaps` of a training), a cell is excluded if its link carries more than
  half of what gloo reaches on a link without a limit, where the processors are the limit: beyond that, networking takes
  more than half of the processors, and computing slows down while the link is busy. Excluded cells are measured and
  listed, and count in no median and no coverage. Where nothing overlaps (on CPUs, all but DDP), what networking costs
  the processors is in the times of the nccl-test, and every cell counts.

Run as root, with a lab of four nodes up and nothing else on the machine:

    multinode lab up --nodes 4 --slots 4 --rate 1gbit
    .venv/bin/python benchmarks/prediction.py STORE

STORE is a directory; what is measured there already is not measured again. `--part TEXT`, repeatable, takes the series
with that text in their names, `--rates` some rates alone, `--report` measures nothing. With `--report`, STORE may be an
archive: `prediction_cells.tar.gz` holds one grid, measured while the machine had other work, against which tests hold
the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multinode.predict.back_test import LEAST_RUNS, Trial, residual_quantile
from multinode.predict.forecast import ForecastRequest, PredictedScenario
from multinode.predict.request import forecast_runs
from multinode.stats.estimate import Estimate, exactly
from multinode.units import goodput_gb_per_s

MULTINODE = str(Path(sys.executable).parent / "multinode")
REPOSITORY = Path(__file__).parent.parent
SCRIPT = "tests/lab/train_mlp.py"
WIDE = "assets/wide"
GBIT_PER_S = {"5gbit": 5.0, "2.5gbit": 2.5, "1gbit": 1.0, "300mbit": 0.3, "100mbit": 0.1, "50mbit": 0.05}
CARRIED = (2, "1gbit")
# torchrun gives several workers a thread each, and one that is alone on its node as many as there are cores.
LAUNCH = ("launch", "--no-check", "--json", "--env", "OMP_NUM_THREADS=1", "--env", "DS_ACCELERATOR=cpu")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
# Of what the processors carry without a limit of the link, where computation overlaps communication.
MOST_SHARE = 0.5

SINGLE_STEPS, ENDLESS_STEPS, WARM_UP_STEPS = 30, 100_000, 5
# A cell is that many steps and seconds, or fewer steps where they are long.
STEPS, SECONDS = 8, 4.0
LONG_STEPS, LONG_SECONDS = 4, 20.0
# As a contrast calls its sides disturbed: such a cell is measured again.
STOLEN_PERCENT, ATTEMPTS = 2.0, 3
START_S, STEP_S, STOP_S, POLL_S = 600.0, 120.0, 90.0, 0.1


class Training(NamedTuple):
    """A job: a YAML with options of `launch`, or arguments of SCRIPT; and whether computation hides communication."""

    yaml: str | None
    options: tuple[str, ...] = ()
    overlaps: bool = False

    def command(self, nodes: int, workers_per_node: int, accumulation: int, steps: int) -> tuple[str, ...]:
        """Of `multinode`."""
        where = ("--nodes", str(nodes), "--workers-per-node", str(workers_per_node))
        if self.yaml is None:
            asked = ("--steps", str(steps), "--accumulation", str(accumulation))
            return (*LAUNCH, *where, "--", SCRIPT, *self.options, *asked)
        asked = ("--set", f"max_steps={steps}", "--set", f"gradient_accumulation_steps={accumulation}")
        return (*LAUNCH, *where, self.yaml, *self.options, *asked)


TINY, ZERO = "configs/tiny_sft.yaml", "configs/tiny_sft_zero2.yaml"
TRAININGS = {
    "DDP": Training(TINY, overlaps=True),
    "DDP wide embedding": Training(TINY, ("--set", f"model_name_or_path={WIDE}/model"), overlaps=True),
    "DDP, buckets of 2 MiB": Training(TINY, ("--set", "ddp_bucket_cap_mb=2"), overlaps=True),
    "LoRA": Training(TINY, ("--set", "finetuning_type=lora", "--set", "lora_target=all"), overlaps=True),
    "ZeRO-2": Training(ZERO),
    "ZeRO-3": Training(ZERO, ("--set", "deepspeed=configs/deepspeed/tiny_z3_config.json")),
    "DDP script": Training(None, ("--strategy", "ddp"), overlaps=True),
    "FSDP2 script": Training(None, ("--strategy", "fsdp2")),
}


class Series(NamedTuple):
    """A training on so many nodes, at each accumulation and rate; its run on one node has the first accumulation."""

    training: str
    nodes: int
    accumulations: tuple[int, ...]
    rates: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people, and in keys."""
        return f"{self.training}, {self.nodes} nodes"


ALL, FAST, SLOW = tuple(GBIT_PER_S), ("5gbit", "1gbit", "300mbit", "100mbit"), ("1gbit", "300mbit", "100mbit")
GRID = (
    Series("DDP", 2, (1, 4), ALL),
    Series("DDP wide embedding", 2, (1,), ("2.5gbit", "1gbit", "100mbit")),
    Series("DDP, buckets of 2 MiB", 2, (1, 4), SLOW),
    Series("LoRA", 2, (1,), ("300mbit", "100mbit", "50mbit")),
    Series("ZeRO-2", 2, (1, 4), FAST),
    Series("ZeRO-3", 2, (1,), FAST),
    # A run without accumulation does not tell whether FSDP reduces in every micro-batch.
    Series("FSDP2 script", 2, (1,), FAST),
    Series("FSDP2 script", 2, (4,), FAST),
    Series("DDP script", 3, (1, 4), SLOW),
    Series("ZeRO-2", 3, (1,), SLOW),
    Series("DDP script", 4, (1,), SLOW),
    Series("FSDP2 script", 4, (1,), SLOW),
)


class Bench:
    """The multinode command, what it measured so far, and where that is stored.

    Args:
        store: a directory; made where it is missing.
    """

    def __init__(self, store: Path) -> None:
        self._store = store.resolve()
        self.evidence = self._store / "evidence"
        self._log = self._store / "done.jsonl"
        self._store.mkdir(parents=True, exist_ok=True)
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self.done: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}

    def keep(self, key: str, row: dict[str, Any]) -> None:
        """Remember what was measured."""
        self.done[key] = {"key": key, **row}
        with self._log.open("a") as log:
            log.write(json.dumps(self.done[key]) + "\n")
        sys.stderr.write(f"{key}: {row}\n")

    def call(self, *arguments: str) -> Any:
        """Run the command and read what it printed; nothing where that is no JSON."""
        done = subprocess.run(
            [MULTINODE, *arguments],
            cwd=REPOSITORY,
            env=self._environment(self.evidence),
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"multinode {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
        return json.loads(done.stdout) if "--json" in arguments else None

    def set_rate(self, rate: str) -> None:
        """Of all nodes."""
        self.call("lab", "rate", "all", rate)

    def scan(self, nodes: int, rate: str) -> None:
        """The nccl-test of so many nodes at a rate, unless it is stored."""
        key = scan_key(nodes, rate)
        if key in self.done:
            return
        self.set_rate(rate)
        # Of messages that take seconds each, nccl-test takes five.
        sizes = ("-b", "64K", "-e", "16M", "-f", "4", "-n", "10", "-w", "1")
        how = (*COLLECTIVES, *sizes, "--nodes", str(nodes), "--no-tcp", "--no-check", "--json")
        found = self.call("nccl-test", *how)
        largest = max((row for row in found["rows"] if row["collective"] == "all_reduce"), key=lambda one: one["count"])
        self.keep(key, {"run_id": found["run_id"], "busbw_gb_per_s": largest["busbw_gb_per_s"]})

    def single(self, series: Series) -> str:
        """A run on one node with as many workers as the series has nodes; its id."""
        training = TRAININGS[series.training]
        found = self.call(*training.command(1, series.nodes, series.accumulations[0], SINGLE_STEPS))
        return str(found["run_id"])

    def cells(self, series: Series, accumulation: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rate by rate, the mean step of one run on the nodes."""
        runs = self._store / "cells" / f"{series.name} x{accumulation}".replace(", ", "-").replace(" ", "-")
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True)
        self.set_rate(series.rates[0])
        command = TRAININGS[series.training].command(series.nodes, 1, accumulation, ENDLESS_STEPS)
        with self._running(runs, command) as process:
            steps = Steps(runs, process)
            steps.wait(lambda ended: len(ended) > WARM_UP_STEPS, START_S)
            for rate in series.rates:
                self.set_rate(rate)
                yield rate, steps.undisturbed()

    @contextlib.contextmanager
    def _running(self, runs: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        with (runs / "launch.log").open("wb") as log:
            process = subprocess.Popen(
                [MULTINODE, *command],
                cwd=REPOSITORY,
                env=self._environment(runs),
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _environment(self, runs: Path) -> dict[str, str]:
        return os.environ | {"MULTINODE_RUNS": str(runs), "MULTINODE_HOSTS": "lab"}


class Step(NamedTuple):
    """Of rank 0, by the monotonic clock that the lab's nodes share with their machine."""

    begun_ns: float
    ended_ns: float


class Steps:
    """The steps of a run that goes on.

    Args:
        runs: the run is the only one there.
        process: that follows it.
    """

    def __init__(self, runs: Path, process: subprocess.Popen[bytes]) -> None:
        self._runs = runs
        self._process = process

    def undisturbed(self) -> dict[str, Any]:
        """The mean step from now on; again, a few times, where a hypervisor gave the processors to others meanwhile."""
        found: dict[str, Any] = {}
        for _ in range(ATTEMPTS):
            found = self._mean()
            if found["stolen_percent"] <= STOLEN_PERCENT:
                break
        return found

    def _mean(self) -> dict[str, Any]:
        now_ns, before = time.monotonic_ns(), processor_ticks()
        counted = self.wait(lambda steps: is_enough(settled(steps, now_ns)), STEP_S * STEPS)
        counted, after = settled(counted, now_ns), processor_ticks()
        return {
            "step_ms": (counted[-1].ended_ns - counted[0].begun_ns) / len(counted) / 1e6,
            "steps": len(counted),
            "from_ns": counted[0].begun_ns,
            "to_ns": counted[-1].ended_ns,
            "stolen_percent": 100 * (after[0] - before[0]) / max(1, after[1] - before[1]),
        }

    def wait(self, is_over: Any, most_s: float) -> list[Step]:
        """The steps so far, once they are what is waited for."""
        deadline = time.monotonic() + most_s
        while not is_over(steps := self._read()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the training ended or stood still after {len(steps)} steps: {self._runs}/launch.log")
            time.sleep(POLL_S)
        return steps

    def _read(self) -> list[Step]:
        found = []
        for path in self._runs.glob("*/samples/node-0/rank-0.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (record := json.loads(line))["kind"] == "step" and record["step_time_us"]:
                    ended_ns = record["mono_ns"]
                    found.append(Step(ended_ns - 1e3 * record["step_time_us"], ended_ns))
        return found


def settled(steps: Sequence[Step], from_ns: int) -> list[Step]:
    """From the second whole step on."""
    return [step for step in steps if step.begun_ns >= from_ns][1:]


def is_enough(steps: Sequence[Step]) -> bool:
    """Whether these make a cell."""
    took_s = (steps[-1].ended_ns - steps[0].begun_ns) / 1e9 if steps else 0.0
    return (len(steps) >= STEPS and took_s >= SECONDS) or (len(steps) >= LONG_STEPS and took_s >= LONG_SECONDS)


def processor_ticks() -> tuple[int, int]:
    """What a hypervisor took so far of this machine's processors, which all nodes share, and all time there was."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def scan_key(nodes: int, rate: str) -> str:
    """Of an nccl-test."""
    return f"nccl-test, {nodes} nodes, {rate}"


def cell_key(series: Series, accumulation: int, rate: str) -> str:
    """Of a cell."""
    return f"{series.name}, accumulation {accumulation}, {rate}"


def main() -> None:
    """Measure what is missing, and print tables and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path, help="directory of what is measured")
    parser.add_argument("--part", action="append", default=[], help="series with that text in their names; repeatable")
    parser.add_argument("--rates", default=",".join(GBIT_PER_S), help="these alone")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, help="write the document there")
    arguments = parser.parse_args()
    # Ignored under nohup, and then by the launches that it ends, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    grid = list(chosen(arguments.part, arguments.rates.split(",")))
    with tempfile.TemporaryDirectory() as unpacked:
        store = arguments.store
        if arguments.report and store.is_file():
            with tarfile.open(store) as archive:
                archive.extractall(unpacked, filter="data")
            store = Path(unpacked)
        bench = Bench(store)
        if not arguments.report:
            measure(bench, grid)
        cells = list(judged(bench, grid))
    for line in report(cells):
        print(line)
    if arguments.json:
        document = {"schema": "multinode.benchmark.prediction/2", "cells": cells}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def chosen(parts: Sequence[str], rates: Sequence[str]) -> Iterator[Series]:
    """Of the grid."""
    for series in GRID:
        kept = tuple(rate for rate in series.rates if rate in rates)
        if kept and (not parts or any(part in series.name for part in parts)):
            yield series._replace(rates=kept)


def measure(bench: Bench, grid: Iterable[Series]) -> None:
    """What is not stored: nccl-tests, then series by series, its run on one node just before its cells."""
    make = [sys.executable, "scripts/make_tiny.py"]
    for arguments in ([], [WIDE, "wide"]):
        subprocess.run([*make, *arguments], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    wanted = [(series, k) for series in grid for k in series.accumulations if missing(bench, series, k)]
    for nodes in sorted({series.nodes for series, _ in wanted}):
        rates = {rate for series, _ in wanted if series.nodes == nodes for rate in series.rates}
        for rate in ("none", *GBIT_PER_S):
            if rate == "none" or rate in rates or (nodes, rate) == CARRIED:
                bench.scan(nodes, rate)
    bench.scan(*CARRIED)
    singles: dict[Series, str] = {}
    for series, accumulation in wanted:
        single = singles[series] = singles.get(series) or bench.single(series)
        for rate, found in bench.cells(series, accumulation):
            bench.keep(cell_key(series, accumulation, rate), {"single": single, **found})


def missing(bench: Bench, series: Series, accumulation: int) -> bool:
    """Whether a cell of that run is."""
    return any(cell_key(series, accumulation, rate) not in bench.done for rate in series.rates)


def judged(bench: Bench, grid: Iterable[Series]) -> Iterator[dict[str, Any]]:
    """Each cell that is stored, and its predictions."""
    for series in grid:
        for accumulation in series.accumulations:
            for rate in series.rates:
                row = bench.done.get(cell_key(series, accumulation, rate))
                if row is not None:
                    yield cell(bench, series, accumulation, rate, row)


def cell(bench: Bench, series: Series, accumulation: int, rate: str, row: dict[str, Any]) -> dict[str, Any]:
    """One cell: times in ms, errors relative to what was measured."""
    alone = bench.done[scan_key(series.nodes, "none")]["busbw_gb_per_s"]
    share = goodput_gb_per_s(GBIT_PER_S[rate]) / alone
    request = ForecastRequest(
        links=(GBIT_PER_S[rate],), nodes=(series.nodes,), workers_per_node=(1,), accumulations=(accumulation,)
    )
    found: dict[str, Any] = {
        "training": series.training,
        "nodes": series.nodes,
        "accumulation": accumulation,
        "rate": rate,
        "measured_ms": row["step_ms"],
        "steps": row["steps"],
        "stolen_percent": row["stolen_percent"],
        "of_processors": share,
        "excluded": TRAININGS[series.training].overlaps and share > MOST_SHARE,
    }
    for source, scan in (("own", scan_key(series.nodes, rate)), ("carried", scan_key(*CARRIED))):
        runs = [row["single"], bench.done[scan]["run_id"]]
        (scenario,) = forecast_runs(bench.evidence, runs, request).scenarios
        found[source] = held_against(scenario, row["step_ms"])
    return found


def held_against(scenario: PredictedScenario, measured_ms: float) -> dict[str, Any]:
    """A prediction and its error. The interval is of samples per second: of the step time, its ends change places."""
    step_ms, low, high = scenario.step_time_ms, *scenario.samples_per_s.bounds
    fastest, slowest = (step_ms * scenario.samples_per_s.value / end for end in (high, low))
    return {
        "step_ms": step_ms,
        "error": step_ms / measured_ms - 1,
        "interval_ms": [fastest, slowest],
        "half_width": (slowest - fastest) / 2 / step_ms,
        "covered": fastest <= measured_ms <= slowest,
        "parts_ms": {name: getattr(scenario.parts, name) for name in ("compute_ms", "comm_ms", "exposed_ms")},
    }


def report(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every cell, then what they come to, by strategy, rate, nodes and accumulation."""
    yield from header("training", "nodes", "accumulation", "link", "measured (ms)", *PREDICTED)
    for one in cells:
        own = one["own"]
        low, high = own["interval_ms"]
        yield row_of(
            *(one[axis] for axis in AXES),
            f"{one['measured_ms']:,.0f}",
            f"{own['step_ms']:,.0f}",
            f"{own['error']:+.1%}",
            f"{low:,.0f} to {high:,.0f}",
            "excluded" if one["excluded"] else "yes" if own["covered"] else "no",
            f"{one['carried']['error']:+.1%}",
        )
    yield ""
    yield from header("cells", "number", *SUMMED, "carried: median error", "inside")
    counted = [one for one in cells if not one["excluded"]]
    for axis in AXES:
        for value in dict.fromkeys(one[axis] for one in counted):
            yield summary(f"{axis} {value}", [one for one in counted if one[axis] == value])
    for name, some in (("all", counted), ("excluded", [one for one in cells if one["excluded"]])):
        if some:
            yield summary(name, some)
    yield ""
    for source in ("own", "carried"):
        yield f"{source}: {conformal(counted, source)}"


def conformal(cells: Sequence[dict[str, Any]], source: str) -> str:
    """Coverage of the conformal interval: each cell's is that of the errors of all trainings but its own."""
    inside, widths = 0, []
    for one in cells:
        others = [trial(other, source) for other in cells if other["training"] != one["training"]]
        if len(others) < LEAST_RUNS:
            return "too few trainings for a conformal interval"
        quantile = residual_quantile(others)
        inside += trial(one, source).residual <= quantile.log_miss
        widths.append(quantile.relative)
    return (
        f"{inside} of {len(cells)} inside the conformal 90% interval of the other trainings' errors, "
        f"median half-width {statistics.median(widths):.1%}"
    )


def trial(one: dict[str, Any], source: str) -> Trial:
    """A cell as the back-test has it, in steps per second."""
    fastest, slowest = one[source]["interval_ms"]
    return Trial(
        name=f"{one['training']}, {one['rate']}",
        predicted=Estimate(value=1e3 / one[source]["step_ms"], low=1e3 / slowest, high=1e3 / fastest),
        measured=exactly(1e3 / one["measured_ms"]),
    )


AXES = ("training", "nodes", "accumulation", "rate")
PREDICTED = ("predicted (ms)", "error", "interval (ms)", "inside", "carried: error")
SUMMED = ("median error", "90th percentile", "worst", "inside", "median half-width")


def header(*names: str) -> tuple[str, str]:
    """Of a table in Markdown."""
    return row_of(*names), row_of(*("---" for _ in names))


def row_of(*values: object) -> str:
    """Likewise."""
    return f"| {' | '.join(map(str, values))} |"


def summary(name: str, cells: Sequence[dict[str, Any]]) -> str:
    """One row."""
    own, carried = ([one[source] for one in cells] for source in ("own", "carried"))
    errors = sorted(abs(one["error"]) for one in own)
    ninetieth = errors[min(len(errors) - 1, round(0.9 * len(errors)))]
    return row_of(
        name,
        len(cells),
        f"{statistics.median(errors):.1%}",
        f"{ninetieth:.1%}",
        f"{errors[-1]:.1%}",
        sum(one["covered"] for one in own),
        f"{statistics.median(one['half_width'] for one in own):.1%}",
        f"{statistics.median(abs(one['error']) for one in carried):.1%}",
        sum(one["covered"] for one in carried),
    )


if __name__ == "__main__":
    main()

"""Runs the multinode of this interpreter's environment as people do first; scripts/release-check starts it there.

Without an option: what needs no node and no chart, and how large and how quick it is. With --report: pages with charts,
for which the environment has the extra `report` by then. With --lab: two virtual nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

_MULTINODE = str(Path(sys.executable).parent / "multinode")
_DEADLINE_S = 300
_MOST_MB = 60.0
_MOST_HELP_S = 0.25
_TIMES = 15
# What an empty environment has already.
_EMPTY = ("pip", "setuptools", "_distutils_hack", "distutils-precedence", "pkg_resources")
_API = """
from multinode import api

forecast = api.predict_from_benchmarks("configs/figures/two_boxes_lora.yaml", api.ForecastRequest(links=(10.0,)))
nodes = api.load_nodes("hostfiles/two4090.txt")
plan = api.plan(api.Launch(cluster=nodes.cluster, hostfile=nodes.hostfile, job=api.load_job("configs/lora_sft.yaml")))
print(len(forecast.scenarios), plan.world_size)
"""


def main() -> None:
    """Run what was asked for; the first thing that is wrong ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("folder", type=Path, help="an empty directory, or that of an earlier call")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    os.chdir(arguments.folder)
    if arguments.report:
        check_report()
    elif arguments.lab:
        check_lab()
    else:
        check_command()
        check_size_and_start()


def check_command() -> None:
    """The package and its command, without a node."""
    package = Path(sysconfig.get_path("purelib")) / "multinode"
    expect((package / "py.typed").is_file(), "the package has py.typed")
    expect(run("--version") == f"multinode {version('multinode-launcher')}\n", "--version")
    expect("launch" in run("--help"), "--help")
    expect("configs/default.yaml" in run("init", "--example"), "init --example")
    plan = run("launch", "--hosts", "hostfiles/two4090.txt", "configs/lora_sft.yaml", "--dry-run")
    expect("192.0.2.12" in plan, "a dry run of the sample files")
    run("import", "configs/figures/published_gpus.yaml")
    expect("| " in run("report", "last", "--format", "markdown"), "a report of a stored run, as Markdown")
    expect("pip install 'plotly" in run("report", "last", code=1), "a page says what it needs")
    done = subprocess.run(
        [sys.executable, "-c", _API], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    expect(done.returncode == 0 and done.stdout.split()[-1] == "4", f"multinode.api: {done.stdout}{done.stderr}")


def check_size_and_start() -> None:
    """How much is installed, and how long `multinode --help` takes."""
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    kept = [path for folder in folders for path in folder.iterdir() if not path.name.startswith(_EMPTY)]
    size_mb = sum(file.stat().st_size for path in kept for file in (path, *path.rglob("*")) if file.is_file()) / 1e6
    (help_s, help_cpu_s), (bare_s, _) = start_s(_MULTINODE, "--help"), start_s(sys.executable, "-c", "pass")
    print(
        f"  {size_mb:.1f} MB installed (at most {_MOST_MB:g}); multinode --help {help_s:.3f} s, {help_s / bare_s:.1f} "
        f"times python -c pass ({bare_s:.3f} s); {help_cpu_s:.3f} s of a processor's time (at most "
        f"{_MOST_HELP_S:g}); least of {_TIMES}, load {os.getloadavg()[0]:.1f}"
    )
    expect(size_mb <= _MOST_MB, "its size")
    # What it takes where nothing else runs; there is no telling how long it waits for others.
    expect(help_cpu_s <= _MOST_HELP_S, "its start")


def check_report() -> None:
    """A page with charts of the run that was stored."""
    run("report", "last", "-o", "page.html")
    expect("plotly" in Path("page.html").read_text(), "a page with charts")


def check_lab() -> None:
    """Two virtual nodes: made, checked, run on, taken down."""
    run("lab", "up", "--nodes", "2", "--rate", "1gbit")
    try:
        checked = json.loads(run("check", "--hosts", "lab", "--json", code=None))
        expect([node["reached"] for node in checked["nodes"]] == [True, True], "check reaches both nodes")
        # There is no torch in this environment, and nothing else may be wrong.
        wrong = {finding["check"] for finding in checked["findings"] if finding["severity"] == "error"}
        expect(wrong <= {"packages"}, f"check finds nothing but that torch is missing: {wrong}")
        program = ("--engine", "exec", "--no-check", "--json", "--", "sh", "-c", "echo rank $NODE_RANK")
        ran = json.loads(run("launch", "--hosts", "lab", *program))
        expect(ran["status"] == "succeeded", "launch runs a program on both nodes")
        expect("succeeded" in run("report", "last", "--format", "markdown"), "its report")
    finally:
        run("lab", "down")
    expect("no lab is running" in run("lab", "down"), "the lab is gone")


def run(*arguments: str, code: int | None = 0) -> str:
    """What the command printed, stdout first.

    Args:
        arguments: its arguments.
        code: the exit code that it must have; None takes any.
    """
    done = subprocess.run(
        [_MULTINODE, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if code is not None and done.returncode != code:
        sys.exit(f"multinode {' '.join(arguments)} exited {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout if "--json" in arguments else done.stdout + done.stderr


def expect(met: bool, what: str) -> None:  # noqa: FBT001 - a condition and its name
    """Say that it is as it should be, or end."""
    if not met:
        sys.exit(f"release-check: FAILED: {what}")
    print(f"  ok: {what}")


def start_s(*argv: str) -> tuple[float, float]:
    """How long a program takes from start to end, and how much of a processor's time: the least of several times."""
    times = []
    for _ in range(_TIMES):
        began, before = time.perf_counter(), os.times()
        subprocess.run(argv, check=True, capture_output=True, timeout=_DEADLINE_S)
        after = os.times()
        used_s = after.children_user + after.children_system - before.children_user - before.children_system
        times.append((time.perf_counter() - began, used_s))
    return min(one for one, _ in times), min(one for _, one in times)


if __name__ == "__main__":
    main()

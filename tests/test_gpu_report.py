"""The report on a GPU: its page, which keeps what it has, and the environment that it runs in, with few packages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from multinode.stats.estimate import of_repeats

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
import gpu_sharing  # noqa: E402 - they are no package
from fine_tunings import h100_rows, main_job  # noqa: E402 - see above
from gpu_lab import BEYOND, Expected, Run, bytes_row, cost_row, failure_row, provoke, told_of, truth_row  # noqa: E402
from gpu_report import _DAY, _parts  # noqa: E402
from provoked import PROVOKED  # noqa: E402
from step_arithmetic import Known, Layers, known_step, size_at  # noqa: E402

DEADLINE_S = 600.0
REQUIREMENTS = ROOT / "tests" / "gpu" / "requirements.txt"
# What a machine with a GPU may have beside torch, and what is carried there.
FEW = ("torch", *(line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")))
PARTS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
from gpu_report import Part, main, report
def python(text):
    return (sys.executable, "-c", "import os, sys, time; from pathlib import Path; " + text)
parts = {{
    "one": Part("The first", python("print('as it comes'); Path(os.environ['SECTION']).write_text('| a | 1 |')")),
    "two": Part("The second", python("print('before'); raise KeyError('kind')")),
    "three": Part("The third", python("print('## The first')")),
    "skips": Part("The skipped one", python("Path(os.environ['SECTION']).write_text('Skipped: no veth.')")),
    "beyond": Part("The one beyond", python(
        "Path(os.environ['SECTION']).write_text('| a | kept |' + 2 * (chr(10) + '| b | beyond its bound |'))")),
    "late": Part("The late one", python("print('waits', flush=True); time.sleep(600)"), 5.0),
    "killed": Part("The killed one", python("print(os.getpid(), flush=True); time.sleep(600)")),
}}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sys.exit(report(parts, {names!r}, Path({output!r})))
"""


def start(output: Path, *names: str) -> subprocess.Popen[str]:
    script = PARTS.format(scripts=str(ROOT / "scripts"), names=list(names), output=str(output))
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)


def run(output: Path, *names: str) -> tuple[int, str]:
    """The exit code, and the page."""
    process = start(output, *names)
    process.communicate(timeout=DEADLINE_S)
    return process.returncode, output.read_text()


def sections(page: str) -> dict[str, str]:
    """The text of each part, by its title; what it printed may look like one."""
    found: dict[str, str] = {}
    for block in re.findall(r"(?ms)^(?:```\n.*?^```$|.*?$)\n", page):
        if block.startswith("## "):
            found[block[3:].strip()] = ""
        elif found:
            found[[*found][-1]] += block
    return {title: text.strip() for title, text in found.items()}


def test_a_part_that_fails_leaves_those_around_it(tmp_path: Path) -> None:
    code, page = run(tmp_path / "page.md", "one", "two", "three")
    assert code == 1
    assert page.startswith("# multinode on a GPU\n\nFailed: two.\n")
    parts = sections(page)
    assert parts["The first"] == "| a | 1 |"
    second = re.sub(r"after \d+ s", "after TIME", parts["The second"])
    assert second.splitlines()[:4] == ["Failed: it ended with code 1 after TIME.", "", "```", "before"]
    assert second.splitlines()[-2:] == ["KeyError: 'kind'", "```"]
    assert (tmp_path / "page.md.one.log").read_text() == "as it comes\n"
    # Nothing else is left there.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "page.md",
        *(f"page.md.{name}.log" for name in ("one", "three", "two")),
    ]


def test_calls_with_one_page_add_up_and_a_part_that_is_run_again_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run(page, "two")[0] == 1
    # The page says what has failed, whichever call it was in.
    assert run(page, "one")[0] == 1
    page.write_text(page.read_text().replace("KeyError", "what it was"))
    code, text = run(page, "one")
    assert code == 1
    assert list(sections(text)) == ["The first", "The second"]
    assert sections(text)["The second"].splitlines()[-2:] == ["what it was: 'kind'", "```"]


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    code, page = run(tmp_path / "page.md", "late", "one")
    assert code == 1
    assert sections(page) == {
        "The first": "| a | 1 |",
        "The late one": "Failed: it took longer than 5 s.\n\n```\nwaits\n```",
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle_the_page_has_what_came_before(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "page.md"
    process = start(output, "one", "killed", "three")
    log = tmp_path / "page.md.killed.log"
    began = time.monotonic()
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.communicate(timeout=DEADLINE_S)
    page = output.read_text()
    assert page.startswith("# multinode on a GPU\n\nFailed: killed.\n")
    parts = sections(page)
    assert parts.pop("The first") == "| a | 1 |"
    assert list(parts.values()) == ["Failed: it was not ended; its output so far is in `page.md.killed.log`."]
    part = int(log.read_text())
    if number == signal.SIGKILL:
        # Nobody was left to end it.
        os.kill(part, signal.SIGKILL)
    while Path(f"/proc/{part}").exists():
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with those few packages and what they need."""
    home = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=DEADLINE_S)
    (site,) = (home / "lib").glob("python*/site-packages")
    linked: set[str] = set()
    left = [*FEW]
    while left:
        name = left.pop()
        if name in linked:
            continue
        linked.add(name)
        found = metadata.distribution(name)
        needed = [requirement for requirement in found.requires or [] if ";" not in requirement]
        left += [re.split(r"[^\w.-]", requirement)[0] for requirement in needed]
        for top in {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    return home / "bin" / "python"


def call(bare: Path, folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script, where nvidia-smi names one GPU."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $* in -L) echo GPU 0 ;; *) echo 'NVIDIA H100, 81559 MiB, 580.1, [N/A]' ;; esac\n")
    smi.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "PYTHON": str(bare), **env}
    command = [str(ROOT / "scripts" / "gpu-report"), *arguments]
    return subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_with_few_packages_it_says_what_it_does(bare: Path, tmp_path: Path) -> None:
    done = call(bare, tmp_path, "--help")
    assert (done.returncode, "--part NAME" in done.stdout) == (0, True), done.stderr


def test_what_is_carried_on_pythonpath_is_found(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "carried" / "torch").mkdir(parents=True)
    (tmp_path / "carried" / "torch" / "__init__.py").write_text("raise ImportError('the carried one')\n")
    page = tmp_path / "page.md"
    done = call(bare, tmp_path, "--part", "machine", "--output", str(page), PYTHONPATH=str(tmp_path / "carried"))
    assert "the carried one" in page.read_text(), done.stderr


def test_programs_that_are_carried_are_found_before_those_of_the_machine(bare: Path, tmp_path: Path) -> None:
    folder = tmp_path / "programs" / "usr" / "sbin"
    folder.mkdir(parents=True)
    (folder / "unshare").write_text('#!/bin/sh\necho "carried: $*" "${LD_LIBRARY_PATH%%:*}"\n')
    (folder / "unshare").chmod(0o755)
    page = tmp_path / "page.md"
    done = call(bare, tmp_path, "--part", "allows", "--output", str(page), CARRIED=str(tmp_path / "programs"))
    assert done.returncode == 0, done.stderr
    libraries = re.escape(f"{tmp_path}/programs/usr/lib/")
    assert re.search(rf"\| tbf \| yes carried: --net tc qdisc .* {libraries}\w+-linux-gnu \|", page.read_text())


@pytest.mark.torch
def test_with_few_packages_the_machine_is_told_and_every_test_is_collected(bare: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = call(bare, tmp_path, "--part", "machine", "--output", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("# multinode on a GPU\n\nEverything below succeeded.\n\n## The machine\n")
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE))
    assert rows["GPU"] == "NVIDIA H100, 81559 MiB, 580.1, [N/A]"
    # Each on a line of its own; this torch has neither.
    assert (rows["CUDA of torch"], rows["NCCL of torch"]) == ("None", "None")
    assert rows["torch"] == metadata.version("torch")
    collected = subprocess.run(
        [
            bare,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "-m",
            "gpu",
            "tests/gpu",
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert len(re.findall(r"^tests/gpu/\S+::", collected.stdout, re.MULTILINE)) >= 18


def test_every_kept_failure_has_what_provokes_it() -> None:
    kept = (ROOT / "tests" / "gpu" / "h100" / "failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["case"] for line in kept} == PROVOKED.keys()
    for name, provoked in PROVOKED.items():
        compile(provoked.script, name, "exec")


@pytest.mark.torch
@pytest.mark.thorough
@pytest.mark.parametrize("case", sorted(name for name, provoked in PROVOKED.items() if not provoked.needs_gpu))
def test_a_failure_that_needs_no_gpu_is_provoked_and_told(case: str, tmp_path: Path) -> None:
    log = provoke(tmp_path / f"{case}.py", PROVOKED[case].script)
    assert "it went on" not in log
    assert told_of(log), log


def test_the_day_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py"), "--rehearse", "--part", "allows"]
    # An empty PATH has neither nvidia-smi nor what would make an interface.
    environ = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output", str(page)], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| GPU | no: nvidia-smi is not here |" in page.read_text()
    assert "The lab needs network namespaces, veth, sshd, nftables" in page.read_text()
    names = {name: part.title for name, part in _parts().items()}
    assert list(names)[:10] == list(_DAY)
    assert {"llamafactory", "failures"} <= names.keys()


def test_the_page_says_what_was_skipped_and_counts_the_rows_beyond_their_bounds(tmp_path: Path) -> None:
    code, page = run(tmp_path / "page.md", "one", "skips", "beyond")
    assert code == 0
    assert page.startswith("# multinode on a GPU\n\nSkipped: skips. Rows beyond their bound: 2 (beyond 2).\n")


@pytest.mark.parametrize(
    ("strategy", "compute_ms", "exposed_ms"),
    [
        # Buckets of 17 ms follow each other from 10 ms on; the backward pass takes 40 ms.
        ("ddp", 60.0, 10.0 + 4 * 17.0 - 40.0),
        ("ddp-accumulation-8", 480.0, 38.0),
        ("own-stream", 60.0, 4 * 17.0),
        # Four all-reduces, then a gather of half of the bytes.
        ("zero2", 60.0, 6 * 17.0),
        # A gather for each pass and a scatter, of half of the bytes each.
        ("zero3", 60.0, 12 * 8.5),
        # Forward four gathers and the last layer, 39 ms; backward the link is idle only while layers 4 and 1 compute,
        # and layer 2 waits for its gather behind the scatter of layer 4.
        ("fsdp2", 60.0, 45.0),
    ],
)
def test_known_truth_is_cycles_and_bytes_over_the_rate(strategy: str, compute_ms: float, exposed_ms: float) -> None:
    layers = Layers(size_bytes=round(17e-3 * 1e9 / 8 * 1448 / 1538))
    known = known_step(strategy, 1.0, layers)
    assert known.compute_ms == compute_ms
    assert known.exposed_ms == pytest.approx(exposed_ms, rel=0.01)
    # Ten times the bytes at ten times the rate.
    assert known_step(strategy, 10.0, size_at(layers, 10.0)).exposed_ms == pytest.approx(known.exposed_ms, rel=1e-6)


def test_a_host_that_computes_waits_for_each_collective_of_fsdp() -> None:
    serial, layers = known_step("fsdp2", 1.0, Layers(), streams=False), Layers()
    assert serial == known_step("zero3", 1.0, layers, streams=False)
    # A gather for each pass, and a scatter that gloo makes of a whole all-reduce, instead of half of one.
    assert serial.exposed_ms == pytest.approx(known_step("zero3", 1.0, layers).exposed_ms * 16 / 12)


def summary(exposed_ms: float | None, compute_ms: float | None = 60.0) -> dict[str, Any]:
    mean = {"exposed_ms": exposed_ms, "wait_ms": 2.0, "compute_ms": compute_ms}
    return {"step_time_ms": {"median": {"is": "estimate", "value": 101.0}}, "split": {"mean": mean}}


def test_a_row_of_known_truth_keeps_its_bound_if_both_parts_are_within_it() -> None:
    known = Known(compute_ms=60.0, exposed_ms=40.0)
    row = truth_row("ddp", Run("r", summary(39.0, 61.2), own_ms=100.5), known)
    assert row.cells == ["ddp", "100.0", "100.5", "101.0", "60.0", "61.2", "+2.0%", "40.0", "41.0", "+2.5%"]
    assert row.keeps
    for told in (summary(41.0), summary(39.0, 64.0), summary(None), summary(39.0, None)):
        assert truth_row("ddp", Run("r", told), known).judged[-1] == BEYOND


@pytest.mark.parametrize(
    ("expected", "nic", "apart"),
    [(8e6, 8.05e6, "+0.6%"), (8e6, 8.1e6, "+1.2%"), (8e6, None, "unknown"), (None, 8e6, "unknown")],
)
def test_bytes_without_a_figure_of_the_nic_or_a_formula_keep_no_bound(
    expected: float | None, nic: float | None, apart: str
) -> None:
    told = {"calls": 8e6, "expected": expected, "nic": nic}
    row = bytes_row("ddp", {"comm": {"bytes_per_step": told, "findings": []}})
    assert (row.cells[4], row.keeps) == (apart, apart == "+0.6%")


def test_what_hooks_cost_is_a_ratio_with_its_interval() -> None:
    row = cost_row("DDP", (of_repeats([10.1, 11.2, 12.1]), of_repeats([10.0, 11.0, 12.0])), 0.01)
    value, low, high = map(float, re.findall(r"([+-][\d.]+)%", row.cells[3]))
    # Each pair is compared with itself: times differ by 20%, the ratios by 1%.
    assert 0.5 < low + 2 < value + 2 < high + 2 < 5
    assert (value, row.keeps) == (1.2, False)
    assert cost_row("DDP", (of_repeats([10.1, 11.2]), of_repeats([10.0, 11.0])), 0.03).keeps


FAILED = {"status": "failed", "stalls": [], "first_failure": {"rank": 1, "message": "rank 1 exited\nwith code 3"}}
ASLEEP = Expected((1,), "fall_asleep")
STALL = {"rank": 1, "message": "rank 1 is in fall_asleep"}


@pytest.mark.parametrize(
    ("run", "expected", "keeps"),
    [
        (FAILED, Expected((1,), "code 3"), True),
        (FAILED, Expected((0,), "code 3"), False),
        (FAILED, Expected((1,), "out of memory"), False),
        (
            {"status": "stopped", "stalls": [STALL], "first_failure": None},
            Expected((1,), "fall_asleep", "stopped"),
            True,
        ),
        # What only ended is told by no cause.
        ({"status": "stopped", "stalls": [], "first_failure": None}, ASLEEP, False),
        ({"status": "succeeded", "stalls": [], "first_failure": None}, ASLEEP, False),
    ],
)
def test_a_failure_is_compared_with_what_is_expected(run: dict[str, Any], expected: Expected, *, keeps: bool) -> None:
    assert failure_row("it", run, expected).keeps == keeps


CONTROL = """#!/bin/sh
# A stand-in for NVIDIA's program: says in its pipe directory what it was asked.
log=$CUDA_MPS_PIPE_DIRECTORY/asked
if [ "$1" = -d ]; then
  [ -n "$REFUSES" ] && { echo "$REFUSES"; exit 1; }
  touch "$CUDA_MPS_LOG_DIRECTORY/control.log"; echo started >> "$log"; cp "$log" "$SEEN"; exit 0
fi
read -r command
echo "$command" >> "$log"; cp "$log" "$SEEN"
case $command in
  get_server_list) echo 41 ;;
  "get_client_list 41") printf '1001\\n1002\\n' ;;
esac
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for MPS's control program writes what it was asked."""
    program = tmp_path / gpu_sharing.CONTROL
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


def test_two_nodes_on_one_gpu_share_it_by_mps_which_ends_with_them(control: Path) -> None:
    with gpu_sharing.shared(2, 1, honest=True) as (sharing, mps):
        assert control.read_text() == "started\n"
        assert sharing.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        pipes = sharing.variables["CUDA_MPS_PIPE_DIRECTORY"]
        # Nodes have directories of their own, which no socket passes.
        assert {pipes, "/dev/shm"} <= set(sharing.directories)
        assert "CUDA MPS" in sharing.words
        assert mps is not None
        assert mps.clients() == ["1001", "1002"]
        assert Path(pipes).is_dir()
    assert control.read_text().splitlines()[-1] == "quit"
    assert not Path(pipes).exists()


def test_without_mps_what_needs_honest_times_is_skipped_with_the_reason(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "An instance of this daemon is already running")
    with pytest.raises(gpu_sharing.Skipped, match="MPS does not start: An instance of this"):
        gpu_sharing.shared(2, 1, honest=True).__enter__()
    with gpu_sharing.shared(2, 1, honest=False) as (sharing, mps):
        assert (sharing.words, mps) == ("2 nodes are time-sliced on one GPU", None)
    monkeypatch.setenv("PATH", str(control.parent / "nothing"))
    with pytest.raises(gpu_sharing.Skipped, match="nvidia-cuda-mps-control is not here"):
        gpu_sharing.shared(2, 1, honest=True).__enter__()


def test_with_several_gpus_each_node_has_its_own_and_mps_is_not_started(control: Path) -> None:
    with gpu_sharing.shared(2, 4, honest=True) as (sharing, mps):
        assert (sharing.gpus, mps) == ((0, 1), None)
    assert not control.exists()


def test_rows_of_the_h100_page_are_the_trainings_that_they_name(tmp_path: Path) -> None:
    rows = dict(h100_rows(tmp_path, tmp_path / "model", 24))
    assert [name.split()[0] for name in rows] == ["LoRA,", "full,", "full,"]
    for name, job in rows.items():
        settings = dict(word.split("=", 1) for word in job if "=" in word)
        assert settings["finetuning_type"] == ("lora" if name.startswith("LoRA") else "full")
        if name.startswith("LoRA"):
            assert settings["lora_rank"] == "8"
            continue
        engine = json.loads(Path(settings["deepspeed"]).read_text())
        assert f"ZeRO-{engine['zero_optimization']['stage']}" in name
        assert engine["zero_optimization"]["overlap_comm"] is True
        # Otherwise transformers refuses a micro-batch that is not the YAML's.
        assert engine["train_micro_batch_size_per_gpu"] == "auto"
    settings = dict(word.split("=", 1) for word in main_job(tmp_path, tmp_path / "model") if "=" in word)
    assert settings["finetuning_type"] == "lora"
    assert json.loads(Path(settings["deepspeed"]).read_text())["zero_optimization"]["stage"] == 2

"""Secrets of the hostfile and of the environment: on the lab, they reach the workers and nothing that others read."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab
from tests.lab.launching import DEADLINE_S, Command, command_line, processes_of, wait_for
from tests.lab.supervised import STAND_IN, TRAIN
from tests.predict.test_recommendations import JOB, keep

pytestmark = [pytest.mark.lab]


def test_secrets_reach_the_worker_and_nothing_that_others_read(
    lab: Lab, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwarded ones, and one of the hostfile: of that, the user's own file is kept as it was written."""
    secret, written = "hf-s3cr3t-of-this-test", "wandb-s3cr3t-of-this-test"
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace(" slots=", f" env.WANDB_API_KEY={written} slots="))
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("PLAIN_NAME", f"also-{secret}")
    forwarded = ("--env", f"PYTHONPATH={STAND_IN}", "--env", "HF_TOKEN", "--env", "PLAIN_NAME")
    launch = ("launch", "--hosts", str(hostfile), "--workers-per-node", "1", *forwarded, "--setup", "true")
    for options in (("--dry-run",), ("--dry-run", "--json")):
        planned = CliRunner().invoke(build_app(), [*launch, *options, "--", TRAIN])
        assert TRAIN in planned.stdout
        assert not _secret_in(planned.stdout, secret, written)
    with command.running(*launch, "--", TRAIN) as process:
        run_id = command.run_id()
        wait_for(lambda: command.steps(1) > 3)
        workers = [pid for pid in processes_of(run_id) if TRAIN in command_line(pid)]
        assert {node_rank for pid in workers for node_rank in _node_ranks(pid, run_id)} == {"0", "1"}
        for pid in workers:
            environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
            assert {f"HF_TOKEN={secret}", f"PLAIN_NAME=also-{secret}", f"WANDB_API_KEY={written}"} <= set(environ)
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _secret_in(_read(path), secret, written)]
        # On the nodes as well: the root of a worker's mount namespace is that of its node.
        kept = [path for pid in workers for path in _run_files(pid)]
        assert {"request.json", "plan.json", "status.json", "log"} <= {path.name for path in kept}
        assert not [path for path in kept if _secret_in(_read(path), secret, written)]
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=DEADLINE_S)
    assert not _secret_in(printed, secret, written)
    kept = [path for path in command.runs.rglob("*") if path.is_file()]
    assert {"plan.json", "run.json", "cluster.json", "node-1.log"} <= {path.name for path in kept}
    assert not [path for path in kept if secret in _read(path)]
    assert not [path for path in kept if written in _read(path)]
    assert "<forwarded>" in (command.runs / run_id / "plan.json").read_text()


FAILING = """
import os, sys
secret = "one-s3cr3t-of-this-test"
assert [word.count(secret) for word in sys.argv[1:]] == [0, 1, 1], "argv"
assert all(secret in os.environ[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")), "environment"
sys.exit(7)
"""
TRAINED = """
model_name_or_path: m
stage: sft
finetuning_type: lora
hub_token: one-s3cr3t-of-this-test
per_device_train_batch_size: 1
max_steps: 2
output_dir: out
"""


def test_a_token_is_in_no_file_after_a_failure_a_training_a_report_and_json(
    lab: Lab, command: Command, tmp_path: Path, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By env., by --env, as an argument, in the setup text and in the YAML; the job itself has it."""
    secret = "one-s3cr3t-of-this-test"
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace(" slots=", f" env.WANDB_API_KEY={secret} slots="))
    monkeypatch.setenv("HF_TOKEN", secret)
    (shared_dir / "fail.py").write_text(FAILING)
    yaml = tmp_path / "sft.yaml"
    yaml.write_text(TRAINED)
    forwarded = ("--env", "HF_TOKEN", "--env", f"PYTHONPATH={STAND_IN}")
    setup = ("--setup", f"export SWANLAB_API_KEY={secret}")
    common = ("launch", "--hosts", str(hostfile), "--workers-per-node", "1", "--no-check", *forwarded, *setup)
    given = ("--api-key", secret, f"--hub_token={secret}")
    failing = ("--engine", "exec", "--", sys.executable, str(shared_dir / "fail.py"), *given)
    printed = {}
    for job, code in ((failing, 1), ((str(yaml),), 0)):
        for options in (("--dry-run",), ("--dry-run", "--json"), ("--json",)):
            done = command.run(*common, *options, *job)
            assert done.returncode == (code if options == ("--json",) else 0), (options, done.stdout, done.stderr)
            printed[*options, job[0]] = done.stdout + done.stderr
        page = tmp_path / f"report-{code}.html"
        for verb in (
            ("show",),
            ("show", "--json"),
            ("logs", "--json"),
            ("runs", "--json"),
            ("report", "-o", str(page)),
        ):
            done = command.run(*verb)
            assert done.returncode == 0, (verb, done.stderr)
            printed[*verb, job[0]] = done.stdout + done.stderr
        assert page.is_file()
    failed = command.document("runs", "--json")["runs"][0]
    assert failed["status"] == "failed"
    assert "exited with code 7" in printed["show", failing[0]], "it failed otherwise"
    assert [name for name, text in printed.items() if secret in text] == []
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path not in {hostfile, yaml}]
    assert {"plan.json", "run.json", "report-0.html", "report-1.html"} <= {path.name for path in kept}
    assert [path for path in kept if secret in _read(path)] == []
    for node in lab.nodes:
        shell = f"ls ~/.multinode/runs/{failed['run_id']}.*/request.json >&2 && ! grep -rlF {secret} ~/.multinode"
        found = subprocess.run(
            [*ns_command(node), "sh", "-c", shell], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert (found.returncode, found.stdout) == (0, ""), (node.name, found)


# It hangs for a moment, with a secret on its command line, and leaves a file.
HANGING = """
import os, pathlib, sys, time
assert "one-s3cr3t-of-this-test" in sys.argv[-1] and "one-s3cr3t-of-this-test" in os.environ["WANDB_API_KEY"]
print("begun", flush=True)
pathlib.Path("/tmp/left.txt").write_text("what is fetched")
time.sleep(6)
"""
MEASURED = "20260101-000000-bbbb"
SHORT = ("--only", "matmul", "--dtype", "fp32", "--size", "64", "--seconds", "0.1", "--alone")
MESSAGES = ("-b", "8", "-e", "8", "-n", "1", "-w", "1")


@pytest.mark.torch
def test_a_token_is_in_no_file_of_any_verb_that_runs_something(
    lab: Lab, command: Command, tmp_path: Path, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their runs as of launch's: of a hang with its diagnosis, too, and of one whose files were fetched."""
    secret = "one-s3cr3t-of-this-test"
    hostfile, yaml, script = tmp_path / "hosts", tmp_path / "sft.yaml", shared_dir / "hang.py"
    advised = tmp_path / "advised.yaml"
    variables = f" env.WANDB_API_KEY={secret} env.PYTHONPATH={STAND_IN} slots="
    hostfile.write_text(Path(lab.hostfile).read_text().replace(" slots=", variables).replace("slots=2", "slots=1"))
    monkeypatch.setenv("HF_TOKEN", secret)
    yaml.write_text(TRAINED)
    script.write_text(HANGING)
    advised.write_text(f"{JOB}hub_token: {secret}\n")
    keep(command.runs, MEASURED, 2, 800)
    hosts = ("--hosts", str(hostfile))
    given = (*hosts, "--no-check", "--env", "HF_TOKEN", "--setup", f"export SWANLAB_API_KEY={secret}")
    real = ("--env", "REAL_TORCH=1")
    program = ("--engine", "exec", "--", sys.executable, str(script), f"--api-key={secret}")
    verbs: dict[str, tuple[str, ...]] = {
        "launch": (*given, "--hang-timeout", "1", "--fetch", "/tmp/left.txt", *program),
        "contrast": (*given, "--repeats", "1", "--steps", "3", str(yaml)),
        "tune": ("--judge", "speed", "--from", MEASURED, "--candidates", "1", *given, "--steps", "3", str(advised)),
        "sweep": (*given, "--steps", "3", "--nodes", "2", "--grid", "per_device_train_batch_size=1", str(yaml)),
        "nccl-test": (*given, *real, *MESSAGES),
        "bench": (*given, *real, *SHORT),
    }
    printed = {}
    for verb, arguments in verbs.items():
        done = command.run(verb, *arguments)
        printed[verb] = done.stdout + done.stderr
        assert done.returncode == 0, (verb, printed[verb])
    assert [name for name, text in printed.items() if secret in text] == []
    kept = [path for path in command.runs.rglob("*") if path.is_file()]
    assert {"stall.json", "left.txt", "contrast.json", "tuning.json", "grid.json", "nccl-test.json", "bench.json"} <= {
        path.name for path in kept
    }
    assert [path for path in kept if secret in _read(path)] == []
    for node in lab.nodes:
        found = subprocess.run(
            [*ns_command(node), "sh", "-c", f"ls ~/.multinode/runs >&2 && ! grep -rlF {secret} ~/.multinode"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (found.returncode, found.stdout) == (0, ""), (node.name, found)


def _secret_in(text: str, *secrets: str) -> bool:
    return any(secret in text for secret in secrets)


def _node_ranks(pid: int, run_id: str) -> list[str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return [text.rpartition(".")[2] for text in variables if text.startswith(f"MULTINODE_RUN_ID={run_id}.")]


def _run_files(pid: int) -> list[Path]:
    variables = dict(
        text.partition("=")[::2] for text in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    )
    root = Path(f"/proc/{pid}/root{variables['MULTINODE_RUN_DIR']}")
    return [path for path in root.rglob("*") if path.is_file()]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

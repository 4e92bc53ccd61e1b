"""Secrets of the hostfile and of the environment: on the lab, they reach the workers and nothing that others read."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.lab.spec import Lab
from tests.lab.launching import DEADLINE_S, Command, command_line, processes_of, wait_for
from tests.lab.supervised import STAND_IN, TRAIN

pytestmark = [pytest.mark.lab]


def test_secrets_reach_the_worker_and_nothing_that_others_read(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwarded ones, and one of the hostfile: of that, the user's own file is kept as it was written."""
    secret, written = "hf-s3cr3t-of-this-test", "wandb-s3cr3t-of-this-test"
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace(" slots=", f" env.WANDB_API_KEY={written} slots="))
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("PLAIN_NAME", f"also-{secret}")
    command = Command(tmp_path / "runs")
    forwarded = ("--env", f"PYTHONPATH={STAND_IN}", "--env", "HF_TOKEN", "--env", "PLAIN_NAME")
    launch = ("launch", "--hosts", str(hostfile), "--workers-per-node", "1", *forwarded, "--prelude", "true")
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

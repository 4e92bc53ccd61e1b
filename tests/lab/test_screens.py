"""What a person sees of a run on a terminal: the job's own words, and what happened when it fails or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from multinode.launch.ending import MOST_LINES
from tests.lab.launching import DEADLINE_S, Command, assert_no_agents, wait_for
from tests.lab.supervised import STAND_IN
from tests.lab.test_lost_node import Terminal, on_terminal
from tests.terminal import left_on_screen

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

WIDTH = 180
LAUNCH = ("launch", "--hosts", "lab", "--no-check", "--grace-period", "3", "--env", f"PYTHONPATH={STAND_IN}")
SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
config = {}
for step in range(1, 40):
    dist.all_reduce(torch.ones(4) if hasattr(torch, "ones") else 1)
    if rank == 0:
        print(f"[red]step {step}\\x1b[2J", flush=True)
    if rank == 3 and step == 3:
        ACTION
"""


@pytest.fixture
def script(shared_dir: Path) -> Path:
    return shared_dir / "train.py"


def screen(terminal: Terminal, controller: subprocess.Popen[bytes]) -> list[str]:
    """The lines that are left."""
    controller.wait(DEADLINE_S)
    terminal.close()
    return left_on_screen(terminal.sent.decode(errors="replace"), WIDTH)


def test_a_failure_is_shown_with_its_line_after_what_rank_0_printed(command: Command, script: Path) -> None:
    script.write_text(SCRIPT.replace("ACTION", 'config["weight_decay"]'))
    terminal = Terminal()
    with on_terminal(command, terminal, *LAUNCH, "--", str(script)) as controller:
        lines = screen(terminal, controller)
    assert controller.returncode == 1
    error = lines.index("error: node1: rank 3 raised KeyError: 'weight_decay'")
    assert lines.index("node0 | [red]step 1") < lines.index("node0 | [red]step 2") < error
    assert lines[error + 2] == 'Where       your script, train.py:11 (rank 3 on node1): config["weight_decay"]'
    assert len("\n".join(lines[error:]).rstrip().splitlines()) <= MOST_LINES


def test_a_hang_that_ctrl_c_ends_is_what_every_verb_says_of_the_run_then(command: Command, script: Path) -> None:
    script.write_text(SCRIPT.replace("ACTION", "time.sleep(600)"))
    terminal = Terminal()
    with on_terminal(command, terminal, *LAUNCH, "--hang-timeout", "8", "--", str(script)) as controller:
        wait_for(lambda: list(command.runs.glob("*/stall.json")))
        os.kill(controller.pid, signal.SIGINT)
        lines = screen(terminal, controller)
    assert controller.returncode == 130
    (ended,) = [line for line in lines if line.startswith("stopped by you; the run had hung for ")]
    assert ended.endswith("s: rank 3 on node1 at train.py:11")
    # One table, and nothing of an earlier one.
    assert [line.startswith(f"{script}  run {command.run_id()}") for line in lines].count(True) == 1
    assert lines.index("node0 | [red]step 3") < lines.index(
        "stopping on all nodes; press Ctrl-C again to kill immediately"
    )
    for verb in ("show", "explain"):
        assert command.run(verb, "last").stdout.splitlines()[0] == ended
    assert "has ended" in command.run("stop", "last").stdout
    assert_no_agents()

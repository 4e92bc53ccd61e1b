"""A log that outgrows its limit, on a node whose file system makes holes and on one whose does not; and a full disk."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab
from tests.lab.launching import Command, wait_for
from tests.lab.supervised import LAUNCH

pytestmark = [pytest.mark.lab]

MIB = 1 << 20
LIMIT = 4 * MIB
# Numbered lines, an error now and then, and pauses in which the supervisor looks.
CHATTER = """
import sys, time
for part in range(24):
    sys.stdout.write("".join(f"part {part} line {line} {'.' * 100}\\n" for line in range(8000)))
    sys.stdout.write(f"Traceback (most recent call last):\\nValueError: reason {part}\\n")
    sys.stdout.flush()
    time.sleep(0.25)
print("the end")
"""


@pytest.fixture
def no_holes(lab: Lab) -> Iterator[None]:
    """On node1 ~/.multinode lies on a file system that cannot give back blocks of a file."""
    shell = [*ns_command(lab.nodes[1]), "sh", "-c"]
    subprocess.run([*shell, "mkdir -p /root/.multinode && mount -t ramfs none /root/.multinode"], check=True)
    subprocess.run([*shell, "chmod 700 /root/.multinode"], check=True)
    yield
    subprocess.run([*shell, "umount --lazy /root/.multinode"], check=True)


def run_on_node(lab: Lab, node_rank: int, script: str) -> str:
    done = subprocess.run([*ns_command(lab.nodes[node_rank]), "sh", "-c", script], capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.usefixtures("no_holes")
def test_a_log_stays_within_its_limit_and_whoever_comes_later_hears_what_is_gone(lab: Lab, command: Command) -> None:
    limit = ("--log-limit", "4M")
    job = ("--engine", "exec", "--", "python3", "-c", CHATTER)
    code, left = command.code_and_document(*LAUNCH, *limit, "--detach", *job)
    assert code == 0
    run_id = left["run_id"]
    used = [0, 0]

    def is_over() -> bool:
        for rank in range(2):
            place = f"/root/.multinode/runs/{run_id}.{rank}"
            used[rank] = max(used[rank], int(run_on_node(lab, rank, f"du -sB1 {place}").split()[0]))
        states = [run_on_node(lab, rank, f"cat /root/.multinode/runs/{run_id}.{rank}/status.json") for rank in range(2)]
        return all('"ended"' in state for state in states)

    wait_for(is_over)
    # What is written between two looks, and a whole copy of the limit's quarter.
    assert max(used) < LIMIT + 4 * MIB
    for rank, is_cut in enumerate((False, True)):
        index = json.loads(run_on_node(lab, rank, f"cat /root/.multinode/runs/{run_id}.{rank}/log.json"))
        assert (index["base_bytes"] > 0) == is_cut
    code, ended = command.code_and_document("attach", run_id, "--json")
    assert (code, ended["status"]) == (0, "succeeded")
    for rank in range(2):
        log = (command.runs / run_id / "logs" / f"node-{rank}.log").read_text()
        assert log.startswith("part 0 line 0 ")
        assert log.endswith("the end\n")
        assert {f"reason {part}" for part in range(24)} <= set(re.findall(r"reason \d+", log))
        gone = re.findall(r"^multinode: .* of the log is missing", log, re.MULTILINE)
        assert gone, "it says so"
        assert "\0" not in log
    shown = command.run("logs", run_id, "--rank", "0").stdout
    assert "of the log is missing: it exceeded --log-limit" in shown


@pytest.mark.usefixtures("lab")
def test_a_follower_that_keeps_pace_has_all_of_it(command: Command) -> None:
    job = ("--engine", "exec", "--", "python3", "-c", CHATTER)
    code, ended = command.code_and_document(*LAUNCH, "--log-limit", "16M", *job)
    assert (code, ended["status"]) == (0, "succeeded")
    for path in Path(ended["directory"]).glob("logs/*.log"):
        assert path.read_text().count(" line ") == 24 * 8000

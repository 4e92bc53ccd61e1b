"""Four ranks of which one breaks step, on a lab of two nodes: rank, collective and line are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab.launching import Command
from tests.lab.supervised import LAUNCH

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

# Four ranks that start on a crowded machine say nothing for longer than a hang would need to be seen.
OPTIONS = ("--env", "REAL_TORCH=1", "--grace-period", "3", "--hang-timeout", "60", "--workers-per-node", "2")
SCRIPT = Path(__file__).parent / "desync_train.py"


@pytest.mark.parametrize(
    ("kind", "rank", "message"),
    [
        pytest.param(
            "operation",
            3,
            r"rank 3 called broadcast \(desync_train.py:33\), "
            r"but ranks 0-2 wait in all_reduce #3 \(desync_train.py:37\)",
            id="operation",
        ),
        pytest.param(
            "group",
            2,
            r"rank 2 has not entered all_gather #2 of group pair \(desync_train.py:29\), "
            r"and is in load_batch \(desync_train.py:20\), idle; rank 3 waits in this collective for ",
            id="group",
        ),
        pytest.param(
            "size",
            2,
            r"rank 2 called all_reduce of 8192 elements \(Float\) \(desync_train.py:35\), "
            r"but ranks 0, 1, 3 wait in all_reduce of 8 elements \(Float\) #3 \(desync_train.py:37\)",
            id="size",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "end",
            1,
            # The pair and the world both wait for it: which of the two is told first is not settled.
            r"rank 1 has not entered all_(gather #2 of group pair \(desync_train.py:29\)"
            r"|reduce #3 \(desync_train.py:37\)), and has ended; ranks? [0-3, -]+ waits?",
            id="end",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_rank_that_breaks_step_is_named_with_the_collective(
    command: Command, shared_dir: Path, kind: str, rank: int, message: str
) -> None:
    script = shared_dir / SCRIPT.name
    script.write_bytes(SCRIPT.read_bytes())
    code, document = command.code_and_document(
        *LAUNCH, *OPTIONS, "--on-hang", "stop", "--", str(script), kind, str(rank), "2"
    )
    failure = document["first_failure"]
    assert (code, failure["node"], failure["rank"]) == (1, f"node{rank // 2}", rank), failure
    assert re.match(message, failure["message"]), failure["message"]

"""Three minutes of the log's soak, with contact cut more often; the whole one is `python -m tests.lab.log_soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.lab.state import Lab
from tests.lab.log_soak import account_of, soak

LINES = [f"line {number:010d} ".ljust(99, ".") + "\n" for number in range(200)]
GONE = "multinode: 1.953 KiB of the log are missing: it exceeded --log-limit, or the job truncated it\n"
END = "the end after 200 lines\n"


@pytest.mark.lab
@pytest.mark.long
@pytest.mark.thorough
def test_every_line_of_a_run_that_prints_past_its_limit_is_accounted_for(lab: Lab, tmp_path: Path) -> None:
    seen = soak(lab, tmp_path / "runs", 3.0, period_s=20.0)
    for node in seen["nodes"]:
        assert node["gaps"] > 0
        assert node["home"] < node["printed"]


def test_a_gap_without_its_notice_is_no_account() -> None:
    assert account_of(iter([*LINES, END])).home == 200
    told = account_of(iter([*LINES[:100], "\n", GONE, *LINES[120:], END]))
    assert (told.home, told.gaps, told.missing_bytes) == (180, 1, 2000)
    for wrong in ([*LINES[:100], *LINES[120:]], [*LINES[:100], GONE, *LINES[121:]], [*LINES, LINES[3]]):
        with pytest.raises(AssertionError):
            account_of(iter([*wrong, END]))

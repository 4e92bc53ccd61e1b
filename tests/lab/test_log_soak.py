"""Three minutes of the log's soak, with contact cut more often; the whole one is `python -m tests.lab.log_soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.lab.state import Lab
from tests.lab.log_soak import account_of, soak

LINES = "".join(f"line {number:010d} ".ljust(99, ".") + "\n" for number in range(200)) + "the end after 200 lines\n"
GONE = "\nmultinode: 1.953 KiB of the log is missing: it exceeded --log-limit, or the job truncated it\n"


@pytest.mark.lab
@pytest.mark.long
@pytest.mark.thorough
def test_every_line_of_a_run_that_prints_past_its_limit_is_accounted_for(lab: Lab, tmp_path: Path) -> None:
    seen = soak(lab, tmp_path / "runs", 3.0, period_s=20.0)
    for node in seen["nodes"]:
        assert node["gaps"] > 0
        assert node["home"] < node["printed"]


@pytest.mark.parametrize("start", [10_000, 10_055])
def test_a_gap_of_any_place_is_accounted_for_by_its_bytes(start: int) -> None:
    assert account_of(LINES, []).home == 200
    log, gap = LINES[:start] + GONE + LINES[start + 2000 :], 2000 - len(GONE)
    told = account_of(log, [gap])
    assert (told.printed, told.gaps, told.missing_bytes) == (200, 1, 2000)
    assert told.home == 180 - (start % 100 > 0)
    wrong = [
        (LINES[:start] + LINES[start + 2000 :], []),
        (log, []),
        (log, [gap + 1]),
        (LINES[:start] + GONE + GONE + LINES[start + 9000 :], [gap, gap]),
        (LINES + LINES[:100], []),
    ]
    for each, gaps in wrong:
        with pytest.raises(AssertionError):
            account_of(each, gaps)

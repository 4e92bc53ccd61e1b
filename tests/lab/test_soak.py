"""Five minutes of the soak; the whole one is `python -m tests.lab.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.lab.state import Lab
from tests.lab.soak import Soak

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.long, pytest.mark.thorough]


def test_a_detached_run_outlives_five_minutes_of_trouble_with_complete_records(lab: Lab, tmp_path: Path) -> None:
    seen = Soak(lab, tmp_path, 1, tmp_path / "soak.jsonl").run(5.0)
    assert seen["events"] >= 10

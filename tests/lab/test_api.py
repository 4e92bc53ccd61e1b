"""The page on Python, run as it stands: every block of it, in one session, on the lab."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.state import Lab
from tests.lab.launching import REPOSITORY, assert_no_agents
from tests.lab.supervised import STAND_IN

pytestmark = [pytest.mark.lab, pytest.mark.torch]

PAGE = REPOSITORY / "docs/how-to/use-from-python.md"


def run_page(lab: Lab, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the names of the page stand for in the end."""
    # Workers have the installed torch; what starts them need not.
    keys = f" slots=1 env.PYTHONPATH={STAND_IN} env.REAL_TORCH=1"
    lines = Path(lab.hostfile).read_text().splitlines()
    hosts = [line if line.startswith("#") or not line else line.replace(" slots=2", "") + keys for line in lines]
    (shared_dir / "hosts.txt").write_text("\n".join(hosts) + "\n")
    shutil.copy(REPOSITORY / "configs/ddp_tiny.py", shared_dir / "train.py")
    monkeypatch.chdir(shared_dir)
    monkeypatch.setenv("MULTINODE_RUNS", str(shared_dir / "runs"))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)  # noqa: S102 - a page of ours
    return names


def test_the_page_on_python_runs_as_it_stands(
    lab: Lab, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = run_page(lab, shared_dir, monkeypatch)
    launched, scan, contrasted = session["launched"], session["scan"], session["contrasted"]
    assert not [finding for finding in session["report"].findings if finding.severity == "error"]
    assert (launched.run.status, launched.run.kind, launched.run.world_size) == ("succeeded", "launch", 2)
    assert launched.summary.steps == 40
    assert (scan.backend, [row.size_bytes for row in scan.rows]) == ("gloo", [1 << 16, 1 << 20, 1 << 24])
    assert contrasted.contrast.candidate.nodes == 2
    assert {scenario.nodes for scenario in session["forecast"].scenarios} == {2, 4}
    assert session["stored"].run == launched.run
    kinds = [session["api"].load_run(path.name).run.kind for path in sorted(Path("runs").iterdir())]
    assert sorted(kinds) == ["contrast", "contrast", "contrast", "launch", "nccl-test"]
    said = capsys.readouterr()
    assert scan.verdict.text in said.out
    assert "probing 2 nodes" in said.out
    assert said.err == ""
    assert_no_agents()

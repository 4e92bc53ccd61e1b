"""The page on Python, run as it stands: every block of it, in one session, on the lab."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from multinode import api
from multinode.lab.state import Lab
from tests.lab.launching import DEADLINE_S, REPOSITORY, assert_no_agents
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
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)  # noqa: S102 - a page of ours
    return names


def test_the_page_on_python_runs_as_it_stands(
    lab: Lab, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = run_page(lab, shared_dir, monkeypatch)
    launched, scan, contrasted, again = (session[name] for name in ("launched", "scan", "contrasted", "again"))
    for report in (session["found"].value, session["report"]):
        assert not [finding for finding in report.findings if finding.severity == "error"]
    run = launched.value.run
    assert (run.status, run.kind, run.world_size, run.command) == ("succeeded", "launch", 2, None)
    assert launched.value.summary.steps == again.summary.steps == 40
    assert (scan.value.backend, [row.size_bytes for row in scan.value.rows]) == ("gloo", [1 << 16, 1 << 20, 1 << 24])
    assert contrasted.value.contrast.candidate.nodes == 2
    assert [cell.state for cell in session["table"].value.cells] == ["measured", "measured"]
    _, _, tried = session["tuned"].value.tuning.rows
    assert tried.gain is not None, tried.why
    assert {scenario.nodes for scenario in session["forecast"].scenarios} == {2, 4}
    assert session["stored"].run == run
    assert "samples/s" in Path("report.md").read_text()
    kinds = [session["api"].load_run(path.name).run.kind for path in Path("runs").iterdir()]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "contrast": 3,
        "launch": 2,
        "nccl-test": 1,
        "sweep": 3,
        "tuning": 4,
    }
    # Each result is shown in a notebook, and none proposes a command that nobody typed.
    for name in ("found", "launched", "scan", "contrasted", "table", "advice", "tuned"):
        assert "<div" in session[name]._repr_html_()
        assert "Next" not in f"{session[name]}{session[name]._repr_html_()}"
    assert contrasted.value.contrast.verdict.message in contrasted._repr_html_()
    said = capsys.readouterr()
    assert scan.value.verdict.message in said.out
    assert "probing 2 nodes" in said.out
    assert said.err == ""
    assert_no_agents()


def test_a_call_in_a_thread_says_what_a_failed_run_died_of_and_fetches_and_tells_of_its_end(
    lab: Lab, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shared_dir)
    monkeypatch.setenv("MULTINODE_RUNS", str(shared_dir / "runs"))
    script = shared_dir / "train.py"
    script.write_text("open('kept.txt', 'w').write('kept')\nraise SystemExit(3)\n")
    found: list[api.Result[api.Launched]] = []

    def call() -> None:
        found.append(
            api.run_launch(
                lab.hostfile,
                [str(script)],
                say=None,
                check=False,
                env={"PYTHONPATH": str(STAND_IN)},
                fetch=["kept.txt"],
                on_end="echo $MULTINODE_EVENT $MULTINODE_STATUS > told",
            )
        )

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(DEADLINE_S)
    (result,) = found
    assert (result.value.run.status, (shared_dir / "told").read_text()) == ("failed", "end failed\n")
    assert result.value.run.first_failure is not None
    assert result.value.run.first_failure.message in result._repr_html_()
    assert result.directory is not None
    assert [path.read_text() for path in result.directory.glob("fetched/**/kept.txt")] == ["kept"]
    assert capsys.readouterr() == ("", "")
    assert_no_agents()

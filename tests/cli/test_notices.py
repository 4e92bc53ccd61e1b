"""`--on-end` and `--notify`: which events of a run are told, once each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.cli.running import NoticeOptions
from multinode.errors import MultinodeError, UsageError
from multinode.launch.context import RunContext
from multinode.records.progress import RunProgress
from multinode.transport.fake import FakeTransport
from tests.launch.test_notice import PROGRESS, STALL
from tests.profile.observing import RUN

TELL = 'echo "$MULTINODE_EVENT $MULTINODE_STATUS" >> told'
HANGS = msgspec.structs.replace(PROGRESS, stall=STALL)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    monkeypatch.chdir(tmp_path)
    for run_id in (PROGRESS.run_id, RUN.run_id):
        (tmp_path / "runs" / run_id).mkdir(parents=True)
    return RunContext(FakeTransport(lambda *_: []), tmp_path / "runs")


def test_each_hang_and_the_end_are_told_once(context: RunContext, tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    context.observe = seen.append
    with NoticeOptions(on_end=TELL).watch(context) as tell_end:
        for progress in (PROGRESS, HANGS, HANGS, PROGRESS):
            context.observe(progress)
        tell_end(msgspec.structs.replace(RUN, status="succeeded"))
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["end succeeded", "hang running"]
    assert seen == [PROGRESS, HANGS, HANGS, PROGRESS]


@pytest.mark.parametrize(("seen", "told"), [([PROGRESS], ["end failed"]), ([], [])])
def test_a_controller_that_cannot_go_on_is_an_end_once_the_run_has_begun(
    context: RunContext, tmp_path: Path, seen: list[RunProgress], told: list[str]
) -> None:
    def follow() -> None:
        with NoticeOptions(on_end=TELL).watch(context):
            for progress in seen:
                context.observe(progress)
            raise MultinodeError("the disk is full")

    (tmp_path / "told").touch()
    with pytest.raises(MultinodeError, match="disk"):
        follow()
    assert (tmp_path / "told").read_text().splitlines() == told


def test_a_run_that_goes_on_has_not_ended_and_a_failure_is_a_warning(
    context: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with NoticeOptions(on_end=f"{TELL}; exit 7").watch(context) as tell_end:
        tell_end(msgspec.structs.replace(RUN, status="running"))
        assert not (tmp_path / "told").exists()
        tell_end(msgspec.structs.replace(RUN, status="stopped"))
    assert (tmp_path / "told").read_text() == "end stopped\n"
    assert "warning: the command of --on-end exited with code 7" in capsys.readouterr().err


def test_a_url_that_is_not_taken_is_refused_before_anything_starts(context: RunContext) -> None:
    with pytest.raises(UsageError, match="https"), NoticeOptions(notify="http://example.com/").watch(context):
        raise AssertionError

from __future__ import annotations

import time
from pathlib import Path

from multinode.node.programs import Query, QueryFailed
from tests.golden import raised

from .localnode import wait_until


def test_only_a_program_that_has_to_be_waited_for_tells_how_long_it_took(tmp_path: Path) -> None:
    began = time.monotonic()
    slow = Query(["sleep", "1"], deadline_s=60.0)
    ended = Query(["touch", str(tmp_path / "done")], deadline_s=60.0)
    assert slow.answer() == ""
    assert slow.waited_s is not None
    assert 1.0 <= slow.waited_s <= time.monotonic() - began
    wait_until(lambda: ended._process is None or ended._process.poll() is not None)  # noqa: SLF001 - it has ended
    ended.answer()
    assert ended.waited_s is None


def test_an_answer_that_lay_ready_counts_though_nobody_asked_in_time() -> None:
    small, large = (Query(["head", "-c", size, "/dev/zero"], deadline_s=0.0) for size in ("5", "200000"))
    wait_until(lambda: small._process is None or small._process.poll() is not None)  # noqa: SLF001 - it has ended
    assert small.answer() == "\0" * 5
    # More than a pipe holds: the program cannot end before it is read.
    assert len(large.answer()) == 200_000


def test_an_answer_or_why_there_is_none_may_be_asked_for_twice() -> None:
    answered, failed = (Query(["sh", "-c", script], deadline_s=60.0) for script in ("echo yes", "echo no >&2; exit 3"))
    for _ in range(2):
        assert answered.answer() == "yes\n"
        assert str(raised(QueryFailed, failed.answer)) == "sh exited with code 3: no"


def test_a_program_that_is_closed_is_gone_with_what_it_started() -> None:
    query = Query(["sh", "-c", "sleep 60 & echo; wait"], deadline_s=60.0)
    process = query._process  # noqa: SLF001 - as above
    assert process is not None
    query.close()
    assert process.poll() is not None
    query.close()

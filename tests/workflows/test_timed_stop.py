from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.core.run.progress import NodeProgress, RunProgress
from multinode.launch.request import StopRequest
from multinode.report.run.progress_table import progress_line
from multinode.transport.fake import FakeTransport
from multinode.workflows.grid.sweep_cell import STEPS_WITHOUT_END, TimedStop, with_time_limit
from multinode.workflows.run.context import RunContext


def at_step(step: int | None, total_steps: int | None = STEPS_WITHOUT_END) -> RunProgress:
    trains = NodeProgress(name="b", node_rank=1, ranks=(1,), state="running", step=step, recent_us=(1e6,))
    nodes = (
        NodeProgress(name="a", node_rank=0, ranks=(0,)),
        msgspec.structs.replace(trains, total_steps=total_steps if step else None),
    )
    return RunProgress(run_id="r", job="j", world_size=2, nodes=nodes)


class Watch:
    """A training of ten seconds, and a clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.user = StopRequest()
        self.timed = TimedStop(self.user, 10.0, lambda: self.now_s)

    def look(self, now_s: float, step: int | None = None) -> int:
        self.now_s = now_s
        self.timed.look(at_step(step))
        return self.timed.stop.count


def test_the_time_begins_with_the_first_step() -> None:
    watch = Watch()
    assert watch.look(200) == 0
    assert watch.look(1000, 1) == 0
    assert watch.look(1009.9, 50) == 0
    assert watch.look(1010, 51) == 1
    assert watch.timed.is_over
    # Once is enough: a second request would cut the grace period short.
    assert watch.look(1020, 51) == 1


def test_what_the_user_asks_is_passed_on_and_is_no_end_in_time() -> None:
    watch = Watch()
    watch.look(0, 1)
    watch.user.ask("SIGINT")
    assert watch.look(1, 2) == 1
    assert watch.timed.stop.reason == "SIGINT"
    assert not watch.timed.is_over
    watch.user.ask("SIGINT")
    assert watch.look(2, 2) == 2


def test_the_user_may_be_impatient_after_the_time_is_over() -> None:
    watch = Watch()
    watch.look(0, 1)
    assert watch.look(10, 2) == 1
    watch.user.ask("SIGINT")
    assert watch.look(11, 2) == 2
    # What it has trained until then is what was asked for.
    assert watch.timed.is_over


def test_the_view_is_shown_all_the_same(tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    context = RunContext(FakeTransport(lambda *_: ()), tmp_path, observe=seen.append)
    limited, timed = with_time_limit(context, 0.0)
    limited.observe(at_step(1))
    limited.observe(at_step(2))
    assert [one.nodes[1].step for one in seen] == [1, 2]
    assert [one.nodes[1].total_steps for one in seen] == [None, None]
    assert seen[-1].training is not None
    assert limited.stop is timed.stop
    assert timed.is_over
    assert context.stop.count == 0


def test_what_is_shown_counts_the_time_and_no_step_that_nobody_means_to_make() -> None:
    watch = Watch()
    watch.look(200)
    before = watch.timed.show(at_step(None))
    assert progress_line(before) == "0.0 s, trained 0.0 s of 10.0 s  a connecting | b running, no output yet"
    watch.look(1000, 1)
    watch.look(1004, 5)
    shown = watch.timed.show(at_step(5))
    assert progress_line(shown) == "0.0 s, trained 4.0 s of 10.0 s, about 6.0 s left  a connecting | b step 5 1000 ms"


def test_a_script_that_ends_before_its_time_shows_its_own_steps() -> None:
    watch = Watch()
    watch.look(1000, 1)
    watch.look(1004, 5)
    shown = watch.timed.show(at_step(5, total_steps=8))
    assert shown.nodes[1].total_steps == 8
    assert shown.left_s == 3.0

"""Contact with a node: reached anew where words no longer get through, and sought no longer once it was given up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from .scripted import DEADLINE_S, HELLO, RUNNING, Execution, Talk


def test_a_node_that_takes_no_word_any_more_is_reached_anew_and_its_lease_goes_on(tmp_path: Path) -> None:
    alone = Execution(tmp_path, "a", lease_s=0.8)

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        talk.order("lease")
        if talk.verb == "supervise":
            talk.is_deaf = True
            # It speaks on, as a node does whose way in is blocked.
            end = time.monotonic() + DEADLINE_S / 2
            while not talk.closed.wait(0.05):
                assert time.monotonic() < end, "the lease has run out"
                talk.say({"kind": "alive", "time_s": 0.0})
        else:
            talk.order("lease")
            talk.end()

    assert alone.run(play).status == "succeeded"


def test_a_node_that_was_given_up_is_sought_no_longer(tmp_path: Path) -> None:
    pair = Execution(tmp_path, "a", "b", verify_s=0.5)

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "b":
            talk.hang_up()
            return
        pair.stop.ask("Ctrl-C")
        pair.stop.ask("Ctrl-C")
        talk.order("stop")
        talk.end(exit_code=None, signal="SIGKILL", cause="stopped")

    assert pair.run(play).status == "lost"
    end = time.monotonic() + DEADLINE_S
    while any(thread.name == "follow-b" for thread in threading.enumerate()):
        assert time.monotonic() < end, "b is still sought, and held"
        time.sleep(0.05)

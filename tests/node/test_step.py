"""The first process of a Slurm step, which is known by a variable that the controller's transport sets."""

from __future__ import annotations

import os
import signal

import pytest

from .localnode import DEADLINE_S, SLEEPER, LocalNode, is_alive, wait_until

STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER


@pytest.fixture
def step(node: LocalNode) -> LocalNode:
    """A node whose verbs are steps; SIGKILL comes 2 s after SIGTERM."""
    node.env["MULTINODE_KILL_WAIT_S"] = "2"
    return node


def test_it_stays_without_a_controller_until_its_run_has_ended(step: LocalNode) -> None:
    with step.supervise(step.script(SLEEPER)) as talk:
        talk.read_log_until(b"ready")
        assert talk.process.stdin is not None
        talk.process.stdin.close()
        # Without a reader it has nothing to wait for but its run, and there is no moment at which that shows: the
        # stop of another step finds the run, and this step alive.
        code, (stopped,) = step.call("stop", {"run_id": "r", "grace_s": 5.0})
        assert (code, stopped["cause"], stopped["processes_left"]) == (0, "stopped", 0)
        assert talk.process.wait(DEADLINE_S) == 0


def test_it_outlives_a_controller_that_went_away_with_its_lease(step: LocalNode) -> None:
    with step.supervise(step.script(SLEEPER), lease_s=1.0) as talk:
        talk.read_log_until(b"ready")
        assert talk.hang_up() == 0
        # When it has ended, so has the run.
        assert (step.status()["state"], step.status()["cause"]) == ("ended", "lease_expired")
        assert not step.processes()


@pytest.mark.parametrize("grace_s", [0.2, 60.0])
def test_sigterm_stops_its_run_in_the_time_that_slurm_leaves(step: LocalNode, grace_s: float) -> None:
    with step.supervise(step.script(STUBBORN), grace_s=grace_s) as talk:
        talk.read_log_until(b"ready")
        talk.process.send_signal(signal.SIGTERM)
        talk.read_all()
        last = talk.records[-1]
        assert (last["kind"], last["cause"], last["signal"], last["processes_left"]) == ("end", "stopped", "SIGKILL", 0)
        assert talk.process.wait(DEADLINE_S) == 0


def test_sigterm_ends_a_step_that_has_no_run(step: LocalNode) -> None:
    with step.talk(
        "connectivity", {"addr": "127.0.0.1", "ports": [], "ephemeral": 1, "token": "t", "deadline_s": 60}
    ) as talk:
        talk.take("listening")
        talk.process.send_signal(signal.SIGTERM)
        assert talk.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_what_slurm_sends_to_the_supervisor_alone_is_as_short(step: LocalNode) -> None:
    """proctrack signals every process of a step, and may miss the first."""
    with step.supervise(step.script(STUBBORN), grace_s=60.0) as talk:
        talk.read_log_until(b"ready")
        os.kill(step.watcher()["pid"], signal.SIGTERM)
        talk.read_all()
        assert (talk.records[-1]["cause"], talk.records[-1]["message"]) == ("stopped", "stopped by SIGTERM")


def test_it_ends_a_run_whose_watchers_were_killed(step: LocalNode) -> None:
    with step.supervise(step.script(STUBBORN), grace_s=0.2) as talk:
        talk.read_log_until(b"ready")
        assert talk.process.stdin is not None
        talk.process.stdin.close()
        job = step.status()["job_pid"]
        step.kill_watchers()
        assert talk.process.wait(DEADLINE_S) == 0
        wait_until(lambda: not is_alive(job))
        assert step.status()["cause"] == "supervisor_lost"


def test_the_job_is_no_step_of_its_own(step: LocalNode) -> None:
    program = "import os\nprint('MULTINODE_KILL_WAIT_S' in os.environ, flush=True)\n"
    assert step.run(step.script(program)).data("log") == b"False\n"

from __future__ import annotations

import pytest

from multinode.diagnose.hang import describe_place, find_wait, parse_main_thread

# In the form of CPython 3.11's faulthandler; the frames of BACKWARD as a gloo job under torch 2.13 showed them.
SITE = "/env/lib/python3.11/site-packages"
ALL_REDUCE = f"""\
Thread 0x00007f625502e6c0 (most recent call first):
  File "/root/.multinode/agent/bdc0.pyz/multinode_agent/worker/recorder.py", line 52 in _drain
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f627d35fb80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3039 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/a/train.py", line 12 in <module>
"""
BACKWARD = f"""\
Current thread 0x00007f627d35fb80 (most recent call first):
  File "{SITE}/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "{SITE}/torch/autograd/__init__.py", line 395 in backward
  File "{SITE}/torch/_tensor.py", line 623 in backward
  File "/home/a/train.py", line 41 in main
"""
LOADER = f"""\
Current thread 0x00007f627d35fb80 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 180 in get
  File "{SITE}/torch/utils/data/dataloader.py", line 1133 in _try_get_data
  File "/home/a/train.py", line 40 in main
"""
# Printed by py-spy 0.4.3 of a gloo job under CPython 3.11 and torch 2.13.
PY_SPY = """\
Process 7701: .venv/bin/python t.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7701 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    main (t.py:10)
    <module> (t.py:11)
Thread 7794 (idle): "other"
    loader (t.py:4)
    Thread.run (threading.py:982)
    Thread._bootstrap_inner (threading.py:1045)
    Thread._bootstrap (threading.py:1002)
"""
# In the same form.
PY_SPY_BACKWARD = """\
Thread 7701 (active): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:979)
    Tensor.backward (torch/_tensor.py:623)
    main (t.py:10)
"""
SYNCHRONIZE = f"""\
Current thread 0x00007f627d35fb80 (most recent call first):
  File "{SITE}/torch/cuda/__init__.py", line 892 in synchronize
  File "/home/a/train.py", line 45 in main
"""


@pytest.mark.parametrize(
    ("stack", "waits_in"),
    [
        (ALL_REDUCE, "all_reduce"),
        (PY_SPY, "all_reduce"),
        (BACKWARD, "backward"),
        (PY_SPY_BACKWARD, "backward"),
        (SYNCHRONIZE, "synchronize"),
        (LOADER, None),
    ],
)
def test_what_a_worker_waits_in_is_the_call_that_needs_the_others(stack: str, waits_in: str | None) -> None:
    assert find_wait(parse_main_thread(stack)) == waits_in


def test_the_place_names_the_innermost_call_and_the_users_own() -> None:
    assert describe_place(parse_main_thread(LOADER)) == "get (queue.py:180), called from main (train.py:40)"


def test_the_main_thread_is_read_whichever_way_the_threads_are_ordered() -> None:
    assert [frame.name for frame in parse_main_thread(ALL_REDUCE)] == ["all_reduce", "wrapper", "<module>"]
    assert [frame.name for frame in parse_main_thread(PY_SPY)][-2:] == ["main", "<module>"]


@pytest.mark.parametrize("text", ["", "no stack at all", "Thread 1:\n", "Current thread 0x1:\n  <no Python frame>\n"])
def test_what_holds_no_frames_stands_nowhere(text: str) -> None:
    assert parse_main_thread(text) == ()

from __future__ import annotations

import subprocess
import sys
import time

import pytest

DEADLINE_S = 20.0
# What is written is more than any pipe holds.
EMITS = """
from multinode.node import channel
channel._READER_DEADLINE_S = {deadline_s}
channel.Channel(0).emit({{"text": "x" * (4 << 20)}})
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_a_record_waits_for_a_slow_reader_and_not_for_one_that_reads_nothing(*, is_read: bool) -> None:
    program = EMITS.format(deadline_s=DEADLINE_S if is_read else 0.2)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if is_read:
                time.sleep(0.3)
                assert len(process.stdout.read()) > 4 << 20
            assert process.wait(DEADLINE_S) == (0 if is_read else 1)
            assert process.stderr is not None
            assert (b"BrokenPipeError: nothing was read for" in process.stderr.read()) is not is_read
        finally:
            process.kill()

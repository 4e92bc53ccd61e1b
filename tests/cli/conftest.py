"""What a test of the command leaves as it found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _verbosity() -> Iterator[None]:
    """As it was: --quiet of one test is not the next one's."""
    log = logging.getLogger("multinode")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.job.job import ScriptJob
from multinode.launch.context import Launched, RunContext
from multinode.launch.launch import launch
from multinode.transport.local import LocalTransport

from .one_gpu import TRAIN, launch_of


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RunContext]:
    """Runs kept below the test's own directory."""
    (tmp_path / "home").mkdir()
    context = RunContext(LocalTransport(tmp_path / "home"), tmp_path / "runs")
    yield context
    context.agent.close()


@pytest.fixture
def train(context: RunContext) -> Callable[..., Launched]:
    """Runs tests/gpu/train.py with these arguments on two nodes to its end; options are those of the plan."""

    def run(*arguments: str, **options: Any) -> Launched:
        job = ScriptJob(argv=(str(TRAIN), *arguments))
        return launch(launch_of(job, **options), context)

    return run

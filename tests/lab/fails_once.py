"""Trains as stand_in/train.py does; in the first attempt of a run rank 1 raises at step 15."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import steps  # type: ignore[import-not-found]  # on PYTHONPATH of the nodes

_record = steps.record_step


def _record_or_fail(step: int, **fields: object) -> None:
    if (step, os.environ["RANK"], os.environ["MULTINODE_ATTEMPT"]) == (15, "1", "1"):
        raise RuntimeError("asked to fail at step 15")
    _record(step, **fields)


steps.record_step = _record_or_fail
runpy.run_path(str(Path(__file__).with_name("stand_in") / "train.py"), run_name="__main__")

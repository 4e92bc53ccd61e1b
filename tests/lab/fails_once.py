"""Trains as configs/ddp_tiny.py does; in the first attempt of a run rank 1 raises at step 15."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if os.environ["MULTINODE_ATTEMPT"] == "1":
    sys.argv += ["--fail-at", "15"]
runpy.run_path(str(Path(__file__).parents[2] / "configs" / "ddp_tiny.py"), run_name="__main__")

"""A LLaMA-Factory training that times its own steps: what profile_overhead.py launches. Knows nothing of multinode.

    torchrun --nproc-per-node 2 benchmarks/timed_training.py configs/tiny_sft.yaml 60

Prints the median time of a step, the first fifth of them left out.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

_WARM_UP = 0.2


class Timer(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """One optimizer step."""
        self.ends_s.append(time.perf_counter())


def main() -> None:
    """Train, and print."""
    config, steps = sys.argv[1:]
    timer = Timer()
    settings = yaml.safe_load(Path(config).read_text()) | {"max_steps": int(steps)}
    run_exp(settings, callbacks=[timer])
    ends_s = timer.ends_s[int(_WARM_UP * len(timer.ends_s)) :]
    times_s = [after - before for before, after in itertools.pairwise(ends_s)]
    sys.stdout.write(f"\nmedian step {statistics.median(times_s):.6f} s over {len(times_s)} steps\n")


if __name__ == "__main__":
    main()

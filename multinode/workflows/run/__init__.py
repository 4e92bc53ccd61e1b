"""launch, attach, stop, clean, logs, runs: one run from its plan to its summary."""

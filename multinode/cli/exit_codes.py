"""Exit codes by the state in which a run ended; a verb that raises ends with the code of its error (errors.py)."""

__all__ = ["OF_RUNS"]

OF_RUNS = {"running": 0, "succeeded": 0, "failed": 1, "lost": 3, "stopped": 130}

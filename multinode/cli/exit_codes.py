"""Exit codes by the state in which a run ended; a verb that raises ends with the code of its error (errors.py)."""

OF_RUNS = {"running": 0, "succeeded": 0, "failed": 1, "lost": 3, "stopped": 130}
OF_STOPS = {"slower_than_one_node": 1}
"""Of a run that was stopped, by the reason, where that is not the user."""

"""One run: its plan, its progress, how it ended, and the list of runs."""

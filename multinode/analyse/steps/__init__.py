"""Where the time of a step goes: exposure, split, stragglers, traces, and the summary of a run."""

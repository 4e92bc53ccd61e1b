"""bench: measuring every worker's device."""

"""The training grid of `sweep`: its cells, their state and values, and tables that were measured elsewhere."""

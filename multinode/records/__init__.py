"""The run directory and what stands in it."""

"""The run directory and its contents."""

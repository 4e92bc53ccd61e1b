"""Several short runs in turns, and their tables."""

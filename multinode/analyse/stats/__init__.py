"""Ranges, spreads, intervals and rates of counters: the ground of all other subjects."""

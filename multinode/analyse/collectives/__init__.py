"""Collectives: algorithms and their bus factors, and what a strategy sends in a step."""

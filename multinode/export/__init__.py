"""Exports of a run's figures and samples for other tools. Only records are read."""

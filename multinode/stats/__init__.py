"""Estimates with intervals, rates, spans of time."""

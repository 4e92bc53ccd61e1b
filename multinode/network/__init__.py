"""Bandwidth of collectives, and what bounds it."""

"""Advice as a table."""

"""Measured devices as a table and a page."""

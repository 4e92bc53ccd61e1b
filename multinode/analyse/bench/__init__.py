"""Measured devices: which is slow, which dropped, and what explains it."""

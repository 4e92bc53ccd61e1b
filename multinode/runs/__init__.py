"""Runs on disk: what is stored of them, decoded once."""

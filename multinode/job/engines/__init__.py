"""Engines: what starts the workers of a job, one module each."""

"""Instrumentation of the training process: stands on PYTHONPATH inside the archive, as top-level modules."""

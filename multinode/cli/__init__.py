"""The command line: one small file a verb; the only place that prints."""

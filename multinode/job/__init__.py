"""The job: its files, model and work."""

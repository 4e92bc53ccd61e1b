"""What is trained: its files, model and work."""

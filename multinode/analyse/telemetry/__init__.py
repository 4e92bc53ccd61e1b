"""What the nodes' counters tell during a run: CPU, NICs and GPUs."""

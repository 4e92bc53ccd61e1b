"""Connectivity of the data plane: connections, streams and round trips between two nodes."""

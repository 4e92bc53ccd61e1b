"""Connectivity and raw streams between the nodes, as the agents measure them."""

"""Execute a plan on the nodes, follow it, stop it."""

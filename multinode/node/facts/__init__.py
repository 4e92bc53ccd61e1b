"""What this node is: machine, network, paths, interpreters, GPUs, and what its kernel log says."""

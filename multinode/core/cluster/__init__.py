"""The nodes: hostfile, ranges of names, what each node has, its data plane, and its price."""

"""Where the workers of a run stand that does not go on: stacks, sockets, NCCL's state."""

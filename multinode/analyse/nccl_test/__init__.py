"""nccl-test: a size scan's verdict, pairs of nodes, raw TCP, and the path that NCCL took."""

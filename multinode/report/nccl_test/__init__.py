"""nccl-test: tables and charts of a size scan and of pairs."""

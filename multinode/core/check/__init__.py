"""What a check finds, and NCCL's own choice of interfaces."""

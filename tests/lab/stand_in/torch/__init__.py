"""Stands in for torch: `torch.distributed` alone."""

"""Stands in for torch.distributed."""

from .rendezvous import (
    all_reduce,
    barrier,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)

__all__ = ["all_reduce", "barrier", "destroy_process_group", "get_rank", "get_world_size", "init_process_group"]

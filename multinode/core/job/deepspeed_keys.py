"""The keys that DeepSpeed reads, so that a misspelt one is found before a node is asked. What they mean is not told.

DeepSpeed ignores a key that it does not know at the top without a word, and refuses one in `zero_optimization` on every
worker. Gathered from release 0.19.8: its constants, its `DeepSpeedZeroConfig`, and what older releases read beside.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from multinode.errors import JobError

__all__ = ["require_known"]

_ZERO = "zero_optimization"
_TOP = """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler
    fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine
    log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_communication_data_type sequence_parallel_size sparse_attention
    sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_IN_ZERO = """
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear
    mics_hierarchical_params_gather mics_shard_size offload_optimizer offload_param overlap_comm override_module_apply
    parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce
    zenflow zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
"""


def require_known(path: Sequence[str], groups: int) -> None:
    """Refuse a key that would stand anew in the JSON and that DeepSpeed does not read.

    Args:
        path: the groups, then the key.
        groups: so many of the groups are there already.

    Raises:
        JobError: it would, with what may have been meant.
    """
    if groups == 0:
        _require(path[0], _TOP.split(), "")
    if groups <= 1 and path[0] == _ZERO and len(path) > 1:
        _require(path[1], _IN_ZERO.split(), f"{_ZERO}.")


def _require(name: str, known: Sequence[str], group: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    raise JobError(
        f"--deepspeed-set {group}{name}: DeepSpeed has no such key, and neither has the JSON",
        hint=f"did you mean {group}{near[0]}?" if near else "a key of another release goes into the JSON itself",
    )

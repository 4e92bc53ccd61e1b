"""What a worker of `bench` records: its device, and every timing of each test on it.

Raw, as `samples` has them all; read by `parse_samples` there. Nothing is computed here.
"""

from __future__ import annotations

import msgspec

from multinode.core.run.profile_samples import Count

__all__ = ["DeviceSample", "SpeedSample"]


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="device"):
    """The device of a worker that begins to measure it.

    Attributes:
        device: `cpu` or `cuda`.
        name: as the driver, or /proc/cpuinfo, calls it; None is unknown.
        threads: that torch computes with on a processor.
        cores: that the worker may run on; `node_cores`, all of the node.
        capability: what its kernels are built for: `sm_90`, `AVX512`.
        memory_gib: of a GPU.
        torch: its version; `cuda` that of the CUDA it was built with.
    """

    rank: Count
    local_rank: Count = 0
    device: str
    name: str | None = None
    threads: Count | None = None
    cores: Count | None = None
    node_cores: Count | None = None
    capability: str | None = None
    memory_gib: float | None = None
    torch: str | None = None
    cuda: str | None = None


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="speed"):
    """One test on one worker's device, gone through once.

    Attributes:
        rank: global rank.
        index: of the test, counted from 0 over all repeats.
        test: `matmul`, `copy`, `triad`, `to_device`, `from_device`, or a layer: `bert`, `gpt2`, `t5_encoder`,
            `t5_decoder`.
        dtype: of DEVICE_DTYPES.
        size: rows of the square matrices, or elements of each buffer.
        width_bytes: of an element.
        backward: of a layer: whether its backward pass is timed, too.
        batch: of a layer, samples at once; likewise `sequence`, tokens of each, `hidden`, its width, `feedforward`,
            the inner width of its two linear maps, and `attentions`, how many it has.
        times_us: of one call, the mean over `calls` of them in a row; every timing, in order.
        began_mono_ns: the node's monotonic clock when the timed calls began; `ended_mono_ns` when they ended.
        error: why it could not be measured; None where it was.
    """

    rank: Count
    index: Count = 0
    test: str
    dtype: str
    size: Count | None = None
    width_bytes: Count | None = None
    backward: bool = False
    batch: Count | None = None
    sequence: Count | None = None
    hidden: Count | None = None
    feedforward: Count | None = None
    attentions: Count | None = None
    times_us: tuple[float, ...] = ()
    calls: Count = 1
    began_mono_ns: Count | None = None
    ended_mono_ns: Count | None = None
    error: str | None = None

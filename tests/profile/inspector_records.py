"""Records of NCCL's Inspector, as plugins/profiler/inspector/README.md of NCCL 2.30.7 shows them, format v4.0."""

from __future__ import annotations

import json
from typing import Any

# "Output Example".
ALL_REDUCE: dict[str, Any] = {
    "header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
    "metadata": {
        "inspector_output_format_version": "v4.0",
        "git_rev": "",
        "rec_mechanism": "profiler_plugin",
        "dump_timestamp_us": 1748030377748202,
        "hostname": "example-hostname",
        "pid": 1639453,
    },
    "coll_perf": {
        "coll": "AllReduce",
        "coll_sn": 1407,
        "coll_msg_size_bytes": 17179869184,
        "coll_exec_time_us": 61974,
        "coll_algobw_gbs": 277.210914,
        "coll_busbw_gbs": 485.119099,
    },
}
# "Output Example Verbose".
REDUCE_SCATTER: dict[str, Any] = {
    "header": {"id": "0xe62dedaa97644a", "rank": 4, "n_ranks": 8, "nnodes": 1},
    "metadata": {
        "inspector_output_format_version": "v4.0",
        "git_rev": "9019a1912-dirty",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1752867229276385,
        "hostname": "example-hostname",
        "pid": 438776,
    },
    "coll_perf": {
        "coll": "ReduceScatter",
        "coll_sn": 1231,
        "coll_msg_size_bytes": 2147483648,
        "coll_exec_time_us": 41057,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 418.439467,
        "coll_busbw_gbs": 366.134533,
        "event_trace_sn": {
            "coll_start_sn": 1,
            "coll_stop_sn": 2,
            "kernel_events": [{"channel_id": 0, "kernel_start_sn": 3, "kernel_stop_sn": 48, "kernel_record_sn": 47}],
        },
        "event_trace_ts": {
            "coll_start_ts": 1752867229235059,
            "coll_stop_ts": 1752867229235064,
            "kernel_events": [
                {
                    "channel_id": 0,
                    "kernel_start_ts": 1752867229235181,
                    "kernel_stop_ts": 1752867229275811,
                    "kernel_record_ts": 1752867229275811,
                }
            ],
        },
    },
}


def line(record: dict[str, Any]) -> bytes:
    """As the plugin writes it: an object a line (inspector_json.cc)."""
    return json.dumps(record).encode() + b"\n"

from __future__ import annotations

import pytest

from multinode.agent.gpus import parse_gpus

# nvidia-smi 550.54.15 with the query of gpus.py, on a box with two RTX 4090.
TABLE = """0, NVIDIA GeForce RTX 4090, 24564, 18, 550.54.15
1, NVIDIA GeForce RTX 4090, 24564, 20311, 550.54.15
"""


def test_the_table_of_nvidia_smi_is_read() -> None:
    first, second = parse_gpus(TABLE)
    assert first == {
        "index": 0,
        "name": "NVIDIA GeForce RTX 4090",
        "memory_total_mib": 24564.0,
        "memory_used_mib": 18.0,
        "driver": "550.54.15",
    }
    assert second["memory_used_mib"] == 20311.0


def test_a_card_that_does_not_tell_has_none() -> None:
    assert parse_gpus("0, GB10, [N/A], [N/A], 580.95\n")[0]["memory_total_mib"] is None


def test_something_else_is_an_error() -> None:
    with pytest.raises(ValueError, match="No devices"):
        parse_gpus("No devices were found\n")

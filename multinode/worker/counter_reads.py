"""When DDP's runtime counters are read: those who record them and those who read the records go by it."""

from __future__ import annotations

READ_EVERY = 64
"""Of a loop that the device never catches up with, one iteration of so many is read: waiting for it costs a bubble."""

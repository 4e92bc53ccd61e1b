"""multinode: launch a training on several nodes over SSH, and measure what the network costs it."""

__version__ = "0.1.0"

"""What stands on PYTHONPATH of the nodes in place of torch, where supervision is tested and not training.

`torch` here is no more than a launcher with torchrun's arguments and its report of a failure, and ranks that wait for
each other over TCP. It starts in a tenth of a second, where torch takes seconds.
"""

"""A run on this node: supervisor, sentinel and lease; its job, its processes, its end; what is streamed home."""

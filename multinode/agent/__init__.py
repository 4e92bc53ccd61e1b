"""Code that runs on the nodes: standard library only, Python 3.9+, ships as one zipapp, imports nothing of ours."""

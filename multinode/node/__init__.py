"""What runs on a node: standard library, Python 3.9. Ships in one archive with `worker`; imports nothing of ours."""

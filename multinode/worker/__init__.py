"""What runs inside a training process. Its entry is `hooks.install`, which `start/sitecustomize.py` calls."""

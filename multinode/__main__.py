"""`python -m multinode` is the same as the `multinode` command."""

from multinode.cli.main import run

run()

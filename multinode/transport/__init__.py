"""SSH and Slurm: the ways to the nodes. The only package that imports fabric or paramiko."""

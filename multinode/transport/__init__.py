"""SSH. The only package that imports fabric or paramiko."""

"""The run directory, hostfiles and configurations on local disk."""

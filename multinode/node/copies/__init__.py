"""Copies of files and directories, passed on from node to node over the training network."""

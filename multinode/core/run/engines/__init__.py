"""Engines: one small pure module each, from job and place in the cluster to the command of one node."""

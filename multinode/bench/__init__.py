"""Nodes measured one by one."""

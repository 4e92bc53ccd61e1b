"""Hosts, their facts and the data plane between them."""

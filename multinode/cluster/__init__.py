"""Hosts, their facts and the network between them."""

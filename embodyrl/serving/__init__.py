"""Policies that act for robots and benchmarks over the network."""

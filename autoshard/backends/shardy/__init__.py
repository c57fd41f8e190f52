"""Shardy, XLA's partitioner, in this process."""

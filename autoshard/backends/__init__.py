"""Compilers and devices: calls them, reads their output, and knows their behaviour."""

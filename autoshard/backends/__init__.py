"""Compilers and devices: how to call them, how to read what they emit, what they are known to do."""

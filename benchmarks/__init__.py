"""Measurements, by command: `python -m benchmarks.<name>`."""

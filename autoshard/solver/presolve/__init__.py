"""Exact reductions of a problem before the search."""

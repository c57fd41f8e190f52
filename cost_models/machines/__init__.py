"""Chips, links and what operations and collectives take on them."""

"""Chips and links, and the seconds of operations and collectives on them."""

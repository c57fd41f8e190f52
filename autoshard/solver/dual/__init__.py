"""Bounds on the optimum by dual ascent."""

"""Optima with proof: mixed-integer programs, elimination, hinges."""

"""Diagnosis: what a program that is sharded by hand loses where, and what to change."""

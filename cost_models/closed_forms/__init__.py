"""Transformers in closed form: FLOPs, memory, traffic and steps of hand-written layouts."""

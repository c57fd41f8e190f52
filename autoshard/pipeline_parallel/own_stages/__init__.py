"""Own stages: every stage of a pipeline has programs of its own, run in the order of a schedule table."""

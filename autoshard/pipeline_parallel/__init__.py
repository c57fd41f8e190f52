"""Pipeline parallelism: a loss whose layers run in stages, as one program."""

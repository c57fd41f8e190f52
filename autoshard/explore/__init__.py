"""Many candidates: meshes, pipelines, serving; their processes and their ranking."""

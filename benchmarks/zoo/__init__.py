"""Programs as people write them, one file per framework; `benchmarks.model_zoo` lists and runs them."""

"""Good choices: local search, block moves, the smallest peak."""

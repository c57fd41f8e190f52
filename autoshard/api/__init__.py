"""The public verbs, and the `Plan` that they return."""

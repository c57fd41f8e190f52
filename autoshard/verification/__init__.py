"""A plan beside what a compiler made of it."""

"""A plan beside the program that a compiler made of it."""

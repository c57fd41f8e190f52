"""The program: jaxprs, graphs, layouts, and the program again with constraints."""

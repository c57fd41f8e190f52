"""Every way to split an equation and what it takes: seconds, bytes, and what hides behind compute."""

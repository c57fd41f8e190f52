"""Every way to split an equation, and its price: seconds, bytes, and the communication that hides."""

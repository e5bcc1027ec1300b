"""How much memory there is, and what is given back when it runs short."""

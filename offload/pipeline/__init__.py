"""Carrying out a placement: lanes with their rings, resident units, and the passes over them."""

"""This checkout beside another one, on the rows of the README's first table."""

"""The torch Ops: the reference, on any device that torch has."""

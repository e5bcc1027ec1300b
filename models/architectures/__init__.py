"""One architecture a file: its config and its tensors' names."""

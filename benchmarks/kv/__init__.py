"""What fewer bits of keys and values change of a model's predictions."""

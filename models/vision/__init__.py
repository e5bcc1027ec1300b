"""Vision encoders and the preparation of pictures. See ``docs/design.md``."""

"""Pictures: what a model sees with. See ``docs/design.md``."""

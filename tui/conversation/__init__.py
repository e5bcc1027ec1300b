"""The open conversation and its model: what the screens show, without any widget."""

"""Documents for models: files and folders as text, and a search in those that are too long."""

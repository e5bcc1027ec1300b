"""What every room may use: errors, settings, options in messages, files, sizes as text."""

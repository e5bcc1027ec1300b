"""Helpers for all packages: errors, settings, options in messages, files, sizes as text."""

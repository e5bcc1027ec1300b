"""Helpers for all packages: errors, settings, options in messages, files, cores, sizes as text."""

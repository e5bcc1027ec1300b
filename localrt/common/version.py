"""The version, which the package's metadata has from here."""

__version__ = "0.1.0"

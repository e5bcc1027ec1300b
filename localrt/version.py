"""The version, for those who must not import the package's face."""

__all__ = ["__version__"]

__version__ = "0.1.0"

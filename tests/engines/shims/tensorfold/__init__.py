"""A simulated TensorFold."""

from tensorfold._version import __version__

__all__ = ["__version__"]

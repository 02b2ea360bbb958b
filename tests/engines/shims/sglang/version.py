"""The version, as the real package states it."""

from sglang._version import __version__

__all__ = ["__version__"]

"""A simulated SGLang: what lies at the places of the real package leads to the simulated engine."""

from sglang.version import __version__

__all__ = ["__version__"]

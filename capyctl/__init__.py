"""CapyCTL: run more models than fit in memory, behind one OpenAI-compatible endpoint."""

__version__ = "0.2.0"

"""The parser class of the command line."""

from simulated_engine.options import Parser as FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]

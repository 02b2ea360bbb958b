"""`tensorfold`."""

import sys

from simulated_engine.tensorfold import Tensorfold

from tensorfold._version import __version__


def main():
    return Tensorfold(__version__).main(sys.argv[1:])

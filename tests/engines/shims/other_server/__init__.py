"""A server of nobody's family."""

import sys

from simulated_engine.other import Other

from other_server._version import __version__


def main():
    return Other(__version__).main(sys.argv[1:])

"""`vllm`."""

import sys

from simulated_engine.vllm import Vllm

from vllm._version import __version__


def main():
    return Vllm(__version__).main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

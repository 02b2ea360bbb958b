"""`vllm serve`, as a class with `cmd`."""

import sys

from simulated_engine.vllm import Vllm

from vllm._version import __version__


class ServeSubcommand:
    name = "serve"

    @staticmethod
    def cmd(args):
        return Vllm(__version__).serve(args, sys.argv[1:])

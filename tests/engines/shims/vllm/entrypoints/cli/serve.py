"""`vllm serve`, as the command line's modules have it."""

import sys

from simulated_engine.vllm import Vllm

from vllm._version import __version__
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args


class ServeSubcommand:
    name = "serve"

    @staticmethod
    def cmd(args):
        sys.exit(Vllm(__version__).serve(args, sys.argv[1:]))

    def validate(self, args):
        validate_parsed_serve_args(args)

    def subparser_init(self, subparsers):
        return make_arg_parser(subparsers.add_parser(self.name, usage="vllm serve [model_tag] [options]"))


def cmd_init():
    return [ServeSubcommand()]

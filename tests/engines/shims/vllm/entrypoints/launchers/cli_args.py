"""The options of `vllm serve`."""

from simulated_engine.vllm import Vllm

from vllm._version import __version__


def make_arg_parser(parser):
    """Define every option on `parser`, and return it."""
    return Vllm(__version__).make_parser(parser)


def validate_parsed_serve_args(args):
    """What is refused although the parser takes it."""
    if getattr(args, "subparser", None) not in (None, "serve"):
        return
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")

"""The older place of the options."""

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

__all__ = ["make_arg_parser", "validate_parsed_serve_args"]

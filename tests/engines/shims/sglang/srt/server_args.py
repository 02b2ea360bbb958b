"""`ServerArgs`: a record of every option, from keywords or from a command line."""

import argparse

from simulated_engine.sglang import Sglang, defaults

from sglang.version import __version__


class ServerArgs:
    def __init__(self, **fields):
        known = defaults()
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{unknown[0]}'")
        for name, value in {**known, **fields}.items():
            setattr(self, name, value)

    @staticmethod
    def add_cli_args(parser):
        Sglang(__version__).make_parser(parser)

    @classmethod
    def from_cli_args(cls, args):
        known = defaults()
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def resolve_once(self):
        """What follows from the given options."""
        self.tokenizer_path = self.tokenizer_path or self.model_path
        self.served_model_name = self.served_model_name or self.model_path


def prepare_server_args(argv):
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))

"""`capyctl`: answers `--version` from almost nothing, and hands everything else to the commands."""

from __future__ import annotations

import sys


def main() -> int:
    """The process's exit status. Import-light on purpose: each command imports what it needs."""
    if sys.argv[1:] == ["--version"]:
        from capyctl import __version__

        print(f"capyctl {__version__}")
        return 0
    from capyctl.cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""The one line that a command says of what it refuses."""

from __future__ import annotations

import pytest

from capyctl.cli.output import print_error
from capyctl.errors import Refusal


def test_what_a_stranger_wrote_into_a_message_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(Refusal("invalid_config", "\x1b[31mred\nis\x9b2J no \u202efield, é is"), as_json=False)
    assert capsys.readouterr().err == "error [invalid_config]: \\x1b[31mred is\\x9b2J no \\u202efield, é is\n"

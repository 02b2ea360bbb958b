"""What a client may read of a failure: the reason and last words, and no place of the machine."""

from __future__ import annotations

import pytest

from capyctl.control import outward


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("the engine exited with status 1 before it was ready", "the engine exited with status 1 before it was ready"),
        (
            "llama.cpp cannot load the model file:\n0.1 I first\n0.2 I second\n"
            "0.3 E failed to load model, '/home/ada/models/qwen/model-Q4.gguf'\n0.4 E exiting",
            "llama.cpp cannot load the model file: "
            "0.2 I second 0.3 E failed to load model, 'model-Q4.gguf' 0.4 E exiting",
        ),
        ("listening on http://127.0.0.1:8100 now", "listening on <address> now"),
        ("bound to [::1]:8100 and localhost:9", "bound to <address> and <address>"),
        ("another program took port 8103; it exited", "another program took port <number>; it exited"),
        ("see ~/models/x and file:///etc/secret", "see x and secret"),
        ("0.01.099.278 I slot, at 10.0.0.7, version 1.2.3", "0.01.099.278 I slot, at <address>, version 1.2.3"),
        ("2/4 slots, 3 / 5", "2/4 slots, 3 / 5"),
        ("", ""),
    ],
)
def test_a_client_reads_the_reason_without_places(reason: str, words: str) -> None:
    assert outward.words(reason) == words


def test_a_long_reason_is_cut() -> None:
    assert len(outward.words("x" * 5000)) == outward.CHARS_MAX

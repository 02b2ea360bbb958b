"""What a client may read of a failure: the reason without the engine's log, and no place of the machine."""

from __future__ import annotations

import time

import pytest

from capyctl.control import outward


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("the engine exited with status 1 before it was ready", "the engine exited with status 1 before it was ready"),
        (
            "llama.cpp cannot load the model file:\n0.1 I first\n0.2 I second\n"
            "0.3 E failed to load model, '/home/ada/models/qwen/model-Q4.gguf'\n0.4 E exiting",
            "llama.cpp cannot load the model file",
        ),
        (
            "the engine was ended by signal 9, perhaps for lack of memory:\n0.02.541.320 I slot print_timing: id 3 | 7",
            "the engine was ended by signal 9, perhaps for lack of memory",
        ),
        (
            "llama.cpp does not accept the argument --no-such-option:\nerror: invalid argument: --no-such-option",
            "llama.cpp does not accept the argument --no-such-option",
        ),
        (
            "the engine exited with status 1: failed to load model, '/home/ada/m.gguf':\n0.3 I slot\n0.4 E exiting",
            "the engine exited with status 1: failed to load model, '<path>'",
        ),
        (
            'the model directory /srv/models/qwem is not there. Did you mean "qwen"?',
            "the model directory <path> is not there.",
        ),
        (
            "the model directory /srv/m/q.gguf is not a directory. Name the directory that holds it, model: /srv/m, "
            "and in engine_config.llamacpp.gguf_file: q.gguf",
            "the model directory <path> is not a directory. Name the directory that holds it, model: <path>, and "
            "in engine_config.llamacpp.gguf_file: q.gguf",
        ),
        ("listening on http://127.0.0.1:8100 now", "listening on <address> now"),
        (
            "b cannot start: https://models.example/m.gguf: Name or service not known",
            "b cannot start: <address>: Name or service not known",
        ),
        ("bound to [::1]:8100 and localhost:9", "bound to <address> and <address>"),
        ("another program took port 8103; it exited", "another program took port <number>; it exited"),
        ("see ~/models/x and file:///etc/secret", "see <path> and <path>"),
        ("0.01.099.278 I slot, at 10.0.0.7, version 1.2.3", "0.01.099.278 I slot, at <address>, version 1.2.3"),
        ("cannot read //etc/x", "cannot read <path>"),
        ("2/4 slots, 3 / 5", "2/4 slots, 3 / 5"),
        (
            "(APIServer pid=31689) INFO 11-29 22:47:41 [api_server.py:271] non-default args: "
            "{'model_tag': '/srv/a b/ada', 'host': '127.0.0.1', 'port': 21484}",
            "INFO 11-29 22:47:41 non-default args: {'model_tag': '<path>', 'host': '<address>', 'port': <number>}",
        ),
        ("pid 19420 (api) is alive", "pid <number> (api) is alive"),
        (
            "--port=8100 port: 8101 ports 8100-8199 master_port=29500",
            "--port=<number> port: <number> ports <number> master_port=<number>",
        ),
        ("processes [12, 13] hold it, process 77 too", "processes <number> hold it, process <number> too"),
        ('File "/usr/lib/x.py", line 12, in load ValueError: bad', "ValueError: bad"),
        ("ggml-cuda.cu:88: CUDA error: out of memory", "CUDA error: out of memory"),
        ("read /root/.ssh/id_rsa, http://10.1.2.3:9999/x?y=1, fe80::1", "read <path>, <address>, <address>"),
        (
            "std::bad_alloc in ggml::run; /v1/models answered 500",
            "std::bad_alloc in ggml::run; /v1/models answered 500",
        ),
        (
            "Qwen/Qwen3-8B wants 14 GiB, 2.5 GiB/s, and/or 16 threads",
            "Qwen/Qwen3-8B wants 14 GiB, 2.5 GiB/s, and/or 16 threads",
        ),
        ("[22:47:41] x[1:2] INFO", "[22:47:41] x[1:2] INFO"),
        ("it supports 3 of them", "it supports 3 of them"),
        ("", ""),
    ],
)
def test_a_client_reads_the_reason_without_places(reason: str, words: str) -> None:
    assert outward.words(reason) == words


def test_words_that_an_engine_made_to_last_are_read_quickly() -> None:
    for odd in (
        "/" * 20000,
        "a://" * 5000,
        ":" * 20000,
        "'/" * 8000,
        "f.py:1" * 3000,
        "[1,1" * 5000,
        "pid " * 5000,
        "1." * 9000,
    ):
        began = time.process_time()
        outward.placeless(odd)
        assert time.process_time() - began < 0.5, odd[:8]


def test_a_long_reason_is_cut() -> None:
    assert len(outward.words("x" * 5000)) == outward.CHARS_MAX

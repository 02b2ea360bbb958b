"""What the last lines of an engine's log become: one bounded line for an operator, and a code that is right."""

from __future__ import annotations

import pytest

from capyctl.cli.output import first_line
from capyctl.cli.progress import check_succeeded
from capyctl.engines.last_words import TELLING_CHARS, out_of_memory, telling
from capyctl.engines.llamacpp.adapter import classify as llamacpp
from capyctl.engines.sglang.failures import classify as sglang
from capyctl.engines.vllm.failures import classify as vllm
from capyctl.errors import CapyError
from capyctl.fsm.types import ProcessIdentity
from capyctl.host.engine import REASON_CHARS, Engine, with_words

CORE = (
    "(EngineCore pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
TRACE = [
    f'(APIServer pid=1)   File "/venv/lib/python3.11/site-packages/vllm/v1/engine/core.py", line {n}, in x'
    for n in range(30)
]
CACHE = (
    "(EngineCore pid=7) ERROR 11-30 03:54:47 [core.py:842] ValueError: To serve at least one request with the models's "
    "max seq len (40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (4.50 GiB). "
    "Based on the available memory, the estimated maximum model length is 32768. Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
LONG = (
    "  Value error, User-specified max_model_len (200000) is greater than the derived max_model_len "
    "(max_position_embeddings=40960 or model_max_length=None in model's config.json). To allow overriding this "
    "maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme "
    "caution. [type=value_error, input_value=ArgsKwargs((), {'model': '" + "x" * 900 + "'})]"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 1.00 GiB is free."
)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (
            CACHE,
            "engine_argument_rejected",
            "40960 tokens: that needs 5.62 GiB of KV cache and there is 4.50 GiB; 32768",
        ),
        (
            "ValueError: The model's max seq len (163840) is larger than the maximum number of tokens that can be "
            "stored in KV cache (63040). Try increasing `gpu_memory_utilization`",
            "engine_argument_rejected",
            "Lower engine_config.context_length",
        ),
        (LONG, "engine_argument_rejected", "a context of 200000 tokens: it derives 40960 for the model"),
        (
            "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (108). Each decode sequence requires",
            "engine_argument_rejected",
            "the states of 108 requests, and 256 are to run at once",
        ),
        (
            "  Value error, max_num_batched_tokens (16) must be greater than or equal to max_num_seqs (32).",
            "engine_argument_rejected",
            "a step of 16 tokens, less than max_num_seqs",
        ),
        (
            "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (131072). This effectively limits",
            "engine_argument_rejected",
            "less than max_model_len",
        ),
        (OOM, "insufficient_device_memory", "2.00 GiB beside 1.00 GiB free of 24.00 GiB"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing",
            "insufficient_device_memory",
            "left no",
        ),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
            "insufficient_memory",
            "its memory",
        ),
        (
            "  Value error, The checkpoint you are trying to load has model type `unheard` but Transformers does not "
            "recognize this architecture.",
            "checkpoint_unusable",
            "does not know the architecture",
        ),
        (
            "ValueError: The quantization method unheard is not supported for the current GPU.",
            "checkpoint_unusable",
            "quantization",
        ),
    ],
)
def test_vllm_s_cause_is_found_above_the_traces_below_it(line: str, code: str, says: str) -> None:
    found = vllm(["INFO: 16 GiB free, out of memory is unlikely", line, CORE, *TRACE, CORE])
    assert found is not None
    assert found[0] == code
    assert says in found[1]
    assert len(found[1]) <= TELLING_CHARS + 60
    assert "\n" not in found[1]


def test_a_longer_context_that_is_allowed_is_a_warning_and_no_cause() -> None:
    warned = LONG.replace(" To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.", "")
    assert vllm([warned, "the end"]) is None
    said = "Warning: User-specified context_length (9000) is greater than the derived context_length (4096). This may"
    assert sglang([said, "the end"]) is None


@pytest.mark.parametrize(("whose", "words"), [("User-specified", "the model"), ("Target model's", "the draft model")])
def test_sglang_s_context_is_named_with_whose_it_is(whose: str, words: str) -> None:
    line = (
        f"ValueError: Warning: {whose} context_length (8192) is greater than the derived context_length (2048). This "
        "may lead to incorrect model outputs or CUDA errors. Note that the derived context_length may differ from "
        "max_position_embeddings in the model's config. To allow overriding this maximum, set the env var "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
    )
    assert sglang([line, "Received sigquit from a child process."]) == (
        "engine_argument_rejected",
        f"SGLang does not start with a context of 8192 tokens: it derives 2048 for {words}. "
        "Lower engine_config.context_length",
    )


def test_a_model_that_llama_cpp_has_no_memory_for_is_not_called_unusable() -> None:
    below = [
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "0.01.099.278 E srv    load_model: failed to load model, '/m/x.gguf'",
    ]
    full = (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 3000 MiB on device 0: cudaMalloc failed: out of memory"
    )
    assert (llamacpp([full, *below[1:]]) or ("",))[0] == "insufficient_device_memory"
    assert (llamacpp(["ggml_aligned_malloc: insufficient memory", *below]) or ("",))[0] == "insufficient_memory"
    assert (llamacpp(["gguf_init: bad magic", below[1]]) or ("",))[0] == "checkpoint_unusable"


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("(EngineCore pid=7) ERROR 11-30 03:54:47 [core.py:842] ValueError: no", "ValueError: no"),
        ("[2026-11-30 03:54:47 TP0] RuntimeError: no", "RuntimeError: no"),
        ("0.01.099.278 E srv    load_model: failed to load model", "srv load_model: failed to load model"),
        ("INFO:     127.0.0.1 - GET /error", None),
        ("WARNING 11-30 03:54:47 [x.py:1] cannot use the fast path", None),
        (CORE, None),
        ("Traceback (most recent call last):", None),
        ("ready", None),
    ],
)
def test_the_telling_line_names_an_error_and_has_no_stamps(line: str, plain: str | None) -> None:
    assert telling(["before", line, "", *TRACE]) == plain


def test_a_line_of_any_length_becomes_a_bounded_part_of_a_message() -> None:
    cause = telling(["ValueError: " + "x" * 5000])
    assert cause is not None
    assert len(cause) == TELLING_CHARS
    assert cause.endswith("…")


def told(reason: str, words: list[str], status: int = 1, fault: str | None = None) -> str:
    """What an engine that ended with that status says; nothing else of it is looked at."""
    engine = Engine(record=None, adapter=None, facts=None, client=None, processes=(), abandoned=lambda: 0)  # type: ignore[arg-type]
    engine.exited, engine.status, engine.fault = ProcessIdentity(7, "boot", 9), status, fault
    return engine.told(reason, words)


def test_a_reason_is_one_line_with_its_cause_and_the_last_lines_stand_below() -> None:
    reason = told("the engine exited with status 1 before it was ready", ["hello", "ValueError: no such thing", CORE])
    head, *below = reason.split("\n")
    assert head == "the engine exited with status 1 before it was ready: ValueError: no such thing:"
    assert below == ["hello", "ValueError: no such thing", CORE]
    assert told("it exited", ["hello"]).split("\n")[0] == "it exited:"
    assert told("it exited", []) == "it exited"
    for sent in (told("it exited", ["Error: x"], -9), told("it exited", ["Error: x"], 1, "it was deaf")):
        assert sent == "it exited:\nError: x"
    flood = with_words("it exited", ["x" * 5000] * 300)
    assert len(flood) == REASON_CHARS
    assert flood.count("\n") <= 20
    assert first_line(reason) == "the engine exited with status 1 before it was ready: ValueError: no such thing"


def test_a_failed_operation_says_one_line_and_where_the_others_are() -> None:
    reason = told("the engine exited with status 1", ["x" * 400] * 19 + ["ValueError: no such thing"])
    with pytest.raises(CapyError) as caught:
        check_succeeded({"state": "failed", "error_code": "launch_failed", "reason": reason}, "qwen")
    assert caught.value.message == (
        "qwen: the engine exited with status 1: ValueError: no such thing; "
        "`capyctl status deployment qwen` has its last lines"
    )
    with pytest.raises(CapyError, match="qwen: no room"):
        check_succeeded({"state": "failed", "error_code": "insufficient_memory", "reason": "no room"}, "qwen")
    with pytest.raises(CapyError, match="follows it") as lost:
        check_succeeded({"state": "uncertain", "reason": reason}, "qwen")
    assert "xxx" not in lost.value.message


@pytest.mark.parametrize("line", ["there is room", "GPU memory: 24 GiB"])
def test_memory_is_named_only_where_it_is_lacking(line: str) -> None:
    assert out_of_memory(line) is None

"""`start standalone | server | host`: settings from everything that states them, then the role itself.

Source: cli 6, config 10.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from capyctl.cli.output import PLAIN, Common, Text, Words, note, wants_json
from capyctl.errors import Refusal

UNUSED = Parameter(show=False)
"""A flag that this release reads and that changes nothing yet, or that it refuses: help is for what works."""


def standalone(
    *,
    listen: Annotated[Text, Parameter(help="Address of the endpoint.")] = None,
    management_listen: Annotated[Text, Parameter(help="Address of the management API; loopback.")] = None,
    no_inference_auth: Annotated[bool, Parameter(negative=(), help="Serve without the API key.")] = False,
    models_root: Annotated[Text, Parameter(help="Directory that relative model paths resolve in.")] = None,
    vllm_bin: Annotated[Text, Parameter(help="Executable of an own vLLM.")] = None,
    sglang_bin: Annotated[Text, Parameter(help="Python of an own SGLang.")] = None,
    tensorfold_bin: Annotated[Text, Parameter(help="Executable of an own TensorFold.")] = None,
    llamacpp_bin: Annotated[Text, Parameter(help="An own llama-server.")] = None,
    engine_fingerprint: Annotated[Text, Parameter(help="Build fingerprint of the own engine.")] = None,
    engine_args: Annotated[Text, Parameter(help="Arguments of every launch, split at spaces.")] = None,
    engine_ports: Annotated[Text, Parameter(help="Loopback ports for engines: 8100-8199.")] = None,
    kv_cache: Annotated[Text, Parameter(help="KV cache of the own engine.")] = None,
    deep_park: Annotated[Text, Parameter(help="on or off.")] = None,
    trust_remote_code: Annotated[Text, Parameter(help="true or false.")] = None,
    installation_drift: Annotated[Text, Parameter(help="warn or refuse.")] = None,
    cuda_home: Annotated[Text, Parameter(help="CUDA toolkit of the own engine.")] = None,
    runtime_dir: Annotated[Text, UNUSED] = None,
    model_sources: Annotated[Text, Parameter(help="Downloads: allowed or disabled.")] = None,
    model_sources_plain_http: Annotated[Text, Parameter(help="http:// downloads: allowed or disabled.")] = None,
    model_sources_max: Annotated[Text, Parameter(help="Most bytes of all downloads.")] = None,
    model_sources_path: Annotated[Text, Parameter(help="Where downloads live.")] = None,
    hf_endpoint: Annotated[Text, Parameter(help="Hub endpoint.")] = None,
    trust_declared_digest: Annotated[Text, Parameter(help="true or false.")] = None,
    peer_address: Annotated[Text, UNUSED] = None,
    rendezvous_ports: Annotated[Text, UNUSED] = None,
    require_rdma: Annotated[Text, UNUSED] = None,
    debug_engine_logs: Annotated[bool, Parameter(negative=(), show=False)] = False,
    set: Annotated[Words | None, Parameter(help="Any setting: <path>=<value>; repeatable.")] = None,
    common: Common = PLAIN,
) -> int:
    """Run everything on this machine, in the foreground."""
    flags = {
        "--listen": listen,
        "--management-listen": management_listen,
        "--no-inference-auth": "none" if no_inference_auth else None,
        "--models-root": models_root,
        "--vllm-bin": vllm_bin,
        "--sglang-bin": sglang_bin,
        "--tensorfold-bin": tensorfold_bin,
        "--llamacpp-bin": llamacpp_bin,
        "--engine-fingerprint": engine_fingerprint,
        "--engine-args": engine_args,
        "--engine-ports": engine_ports,
        "--kv-cache": kv_cache,
        "--deep-park": deep_park,
        "--trust-remote-code": trust_remote_code,
        "--installation-drift": installation_drift,
        "--cuda-home": cuda_home,
        "--runtime-dir": runtime_dir,
        "--model-sources": model_sources,
        "--model-sources-plain-http": model_sources_plain_http,
        "--model-sources-max": model_sources_max,
        "--model-sources-path": model_sources_path,
        "--hf-endpoint": hf_endpoint,
        "--trust-declared-digest": trust_declared_digest,
        "--peer-address": peer_address,
        "--rendezvous-ports": rendezvous_ports,
        "--require-rdma": require_rdma,
    }
    from capyctl.documents.settings import Stated, effective

    settings = effective(
        Stated(
            flags={word: text for word, text in flags.items() if text is not None},
            overrides=tuple(set or ()),
            environ=dict(os.environ),
            cwd=os.getcwd(),
            config=common.config,
            state_dir=common.state_dir,
            debug_engine_logs=debug_engine_logs,
        )
    )
    form = _role_form(common)
    for notice in settings.notices:
        note(notice)
    # Client commands must not pay for trio and the listeners, so the role is imported where it starts.
    from capyctl.roles.standalone import run

    return int(run(settings, format=form))


def _role_form(common: Common) -> str:
    """`text` or `json`: as stated, else text when stderr is a terminal."""
    if wants_json(common.format, common.json):
        return "json"
    return "text" if common.format is not None or sys.stderr.isatty() else "json"


def server(*, set: Annotated[Words | None, Parameter(show=False)] = None, common: Common = PLAIN) -> None:
    """Run the server of several machines (not in this release)."""
    raise _several_machines("server")


def host(*, set: Annotated[Words | None, Parameter(show=False)] = None, common: Common = PLAIN) -> None:
    """Run a GPU machine that a server drives (not in this release)."""
    raise _several_machines("host")


def _several_machines(role: str) -> Refusal:
    return Refusal(
        "unsupported",
        f"this release runs one machine and has no {role} role yet; use `capyctl start standalone` on this machine",
    )

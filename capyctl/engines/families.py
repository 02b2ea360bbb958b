"""The families that this release runs, by the word that documents use for them. One row each.

A family brings what it can prove (traits for control), its options and variables as data, how its
installations are found and measured, and the adapter that drives one. Adding a family is adding a
sub-package and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from capyctl.control.spec import Traits
from capyctl.documents.deployment import Deployment
from capyctl.engines.adapter import Adapter
from capyctl.engines.custom import options as custom_options
from capyctl.engines.custom.adapter import CustomAdapter
from capyctl.engines.environment import EVERY_ENGINE, FREE_NAMES, Reserved
from capyctl.engines.installations import Found, Measurement
from capyctl.engines.llamacpp import installation as llamacpp
from capyctl.engines.llamacpp import options as llamacpp_options
from capyctl.engines.llamacpp.adapter import LlamacppAdapter
from capyctl.engines.llamacpp.render import check_served_name
from capyctl.engines.options import OptionPolicy
from capyctl.engines.registered import Registered
from capyctl.engines.sglang import installation as sglang
from capyctl.engines.sglang import options as sglang_options
from capyctl.engines.sglang.adapter import SglangAdapter
from capyctl.engines.sglang.render import check_document as check_sglang
from capyctl.engines.sglang.render import check_served_name as check_sglang_name
from capyctl.engines.sglang.render import restart_only as sglang_restart_only
from capyctl.engines.tensorfold import installation as tensorfold
from capyctl.engines.tensorfold import options as tensorfold_options
from capyctl.engines.tensorfold.adapter import TensorfoldAdapter
from capyctl.engines.tensorfold.adapter import built as built_tensorfold
from capyctl.engines.tensorfold.adapter import check_document as check_tensorfold
from capyctl.engines.tensorfold.render import check_served_name as check_tensorfold_name
from capyctl.engines.vllm import installation as vllm
from capyctl.engines.vllm import options as vllm_options
from capyctl.engines.vllm.adapter import VllmAdapter
from capyctl.engines.vllm.render import check_document as check_vllm
from capyctl.engines.vllm.render import check_served_name as check_vllm_name
from capyctl.engines.vllm.render import restart_only as vllm_restart_only
from capyctl.errors import Refusal
from capyctl.fsm.types import Millis


@attrs.frozen(kw_only=True)
class Family:
    """What the rest of CapyCTL needs to know of one engine family."""

    name: str
    title: str
    traits: Traits
    options: OptionPolicy
    reserved_env: tuple[Reserved, ...]
    binaries: tuple[str, ...]  # program names that detection looks for
    distributions: tuple[str, ...]  # packages that detection looks for in environments
    find: Callable[[Path], Found | None]
    measure: Callable[[Path], Measurement]
    check_served_name: Callable[[str], None]
    adapter: Callable[[Registered, Path | None, bool], Adapter]
    decisions: Callable[[str], bool] = lambda version: False
    check_document: Callable[[Deployment, Registered], None] = lambda document, registered: None
    """What the family's options add to a deployment's rules. Raises: Refusal."""
    restart_only: Callable[[Deployment, Registered], str | None] = lambda document, registered: None
    """Why a deployment on a family that parks cannot, by its own options; None where it can."""
    scales_yarn: Callable[[str], bool] = lambda version: False
    """Whether a build takes a context of the original length times the factor of a model with yarn."""
    aborts: Callable[[str], bool] = lambda version: True  # whether a build has the family's abort by id
    built: Callable[[Registered, Path], bool] = lambda registered, state_dir: True
    """Whether kernels that the family compiles on its first start are there, below a state directory. Blocking."""
    glance: Callable[[Path], Measurement] | None = None  # instead of `measure` at each start of a role; runs nothing
    remote_code: bool = False  # a model may bring code, when the profile and the deployment allow it
    toolkit: bool = False  # `engine add` looks for a CUDA toolkit and records it
    toolchain: Callable[[Path, str | None], None] = lambda executable, cuda_home: None
    """(program, CUDA toolkit) -> nothing. Raises: Refusal `toolchain_missing` naming what a launch would lack."""


def _measure_llamacpp(executable: Path) -> Measurement:
    """Run the program once and digest its files. Raises: Refusal, see `installation.read_version`."""
    llamacpp.check_config_file()
    said = llamacpp.read_version(executable)
    return Measurement(version=said.version, fingerprint=said.fingerprint, digest=llamacpp.fingerprint(executable))


LLAMACPP = Family(
    name="llamacpp",
    title="llama.cpp",
    # Its EOF after our half-close means that the request's handler returned: seen 1.0 s after the half-close.
    traits=Traits(
        family="llamacpp", parks=False, idle_signal=True, abort_by_id=False, vectors=False, eof_proves_end=True
    ),
    options=llamacpp_options.POLICY,
    reserved_env=llamacpp_options.RESERVED_ENV,
    binaries=("llama-server",),
    distributions=(llamacpp.PACKAGE.distribution,),
    find=llamacpp.find,
    measure=_measure_llamacpp,
    check_served_name=check_served_name,
    adapter=lambda registered, models_root, telemetry: LlamacppAdapter(
        registered=registered, models_root=models_root, telemetry=telemetry
    ),
    # Builds between releases serve the route as well; whether a model is one shows once it runs.
    decisions=lambda version: True,
)
TENSORFOLD = Family(
    name="tensorfold",
    title="TensorFold",
    # Its first request waits for kernels that are being built.
    traits=Traits(
        family="tensorfold", parks=False, idle_signal=True, abort_by_id=False, least_deadline_ms=Millis(1_800_000)
    ),
    options=tensorfold_options.POLICY,
    reserved_env=tensorfold_options.RESERVED_ENV,
    binaries=(),
    distributions=("tensorfold",),
    find=tensorfold.PACKAGE.find,
    measure=tensorfold.measure,
    glance=tensorfold.PACKAGE.glance,
    check_served_name=check_tensorfold_name,
    adapter=lambda registered, models_root, telemetry: TensorfoldAdapter(
        registered=registered, models_root=models_root, telemetry=telemetry
    ),
    check_document=check_tensorfold,
    built=built_tensorfold,
    toolkit=True,
    toolchain=tensorfold.check_toolchain,
)

VLLM = Family(
    name="vllm",
    title="vLLM",
    traits=Traits(family="vllm", parks=True, idle_signal=True, abort_by_id=False, cache_salt=True),
    options=vllm_options.POLICY,
    reserved_env=vllm_options.RESERVED_ENV,
    binaries=(),
    distributions=("vllm",),
    find=vllm.PACKAGE.find,
    measure=vllm.measure,
    glance=vllm.PACKAGE.glance,
    check_served_name=check_vllm_name,
    adapter=lambda registered, models_root, telemetry: VllmAdapter(
        registered=registered, models_root=models_root, telemetry=telemetry
    ),
    check_document=check_vllm,
    scales_yarn=vllm.scales_yarn,
    restart_only=vllm_restart_only,
    remote_code=True,
    toolkit=True,
)

SGLANG = Family(
    name="sglang",
    title="SGLang",
    traits=Traits(family="sglang", parks=True, idle_signal=True, abort_by_id=True, cache_salt=True),
    options=sglang_options.POLICY,
    reserved_env=sglang_options.RESERVED_ENV,
    binaries=(),
    distributions=("sglang",),
    find=sglang.PACKAGE.find,
    measure=sglang.measure,
    glance=sglang.PACKAGE.glance,
    check_served_name=check_sglang_name,
    adapter=lambda registered, models_root, telemetry: SglangAdapter(
        registered=registered, models_root=models_root, telemetry=telemetry
    ),
    decisions=sglang.decides,
    check_document=check_sglang,
    restart_only=sglang_restart_only,
    aborts=sglang.aborts,
    remote_code=True,
    toolkit=True,
)


def _never_measured(executable: Path) -> Measurement:
    raise Refusal("engine_unsupported", f"{executable}: a custom engine is registered with --custom and a manifest")


def _check_custom_name(name: str) -> None:
    """A custom engine is given the name as one word, which must not read as an option. Raises: Refusal."""
    if name.startswith("-"):
        raise Refusal("invalid_config", f"routes: {name!r} cannot be the served name on a custom engine")


CUSTOM = Family(
    name="custom",
    title="a custom engine",
    traits=Traits(family="custom", parks=False, idle_signal=True, abort_by_id=False),
    options=custom_options.POLICY,
    reserved_env=custom_options.RESERVED_ENV,
    binaries=(),
    distributions=(),
    find=lambda path: None,  # nothing tells one from another program
    measure=_never_measured,
    check_served_name=_check_custom_name,
    adapter=lambda registered, models_root, telemetry: CustomAdapter(registered=registered, telemetry=telemetry),
    decisions=lambda version: True,  # its manifest says, and is asked when a deployment is checked
)

FAMILIES: dict[str, Family] = {row.name: row for row in (VLLM, SGLANG, TENSORFOLD, LLAMACPP, CUSTOM)}
KNOWN_WORDS = ("vllm", "sglang", "tensorfold", "llamacpp", "custom")
"""Words of the documents, including families that this release does not run."""


def family(name: str) -> Family:
    """The family of that word. Raises: Refusal `engine_unsupported` naming what this release runs."""
    found = FAMILIES.get(name)
    if found is None:
        raise Refusal("engine_unsupported", f"this release does not run {name}; it runs {', '.join(FAMILIES)}")
    return found


def traits_of(registered: Registered) -> Traits:
    """What one installation can prove: its family's traits, without what its profile gives away or lacks."""
    traits = family(registered.engine).traits
    if registered.manifest is not None and registered.manifest.idle is None:
        return attrs.evolve(traits, idle_signal=False)
    return attrs.evolve(
        traits,
        parks=traits.parks and registered.profile.parks,
        abort_by_id=traits.abort_by_id and family(registered.engine).aborts(registered.version),
    )


def flag_rows(name: str) -> list[tuple[str, str, str, str]]:
    """(KIND, NAME, CLASS, WHY) of every option and variable that a family classes, for `capyctl engine flags`."""
    known = family(name)
    rows = [("option", ", ".join(rule.names), rule.kind.value, rule.why) for rule in known.options.rules]
    if known.options.gated_suffixes:
        shapes = ", ".join(f"--*{suffix}" for suffix in known.options.gated_suffixes)
        why = "the name says that it takes a file, a directory or a configuration"
        rows.append(("option", shapes, "approval", why))
    if known.options.unchecked:
        rows.append(("option", "any", "passed", "the options of a custom engine are not checked"))
    else:
        rows.append(("option", "any other", "passed", "not owned by CapyCTL"))
    rows += [("variable", row.pattern, "reserved", row.why) for row in (*EVERY_ENGINE, *known.reserved_env)]
    rows += [("variable", free, "passed", "needs no approval") for free in sorted(FREE_NAMES)]
    rows.append(("variable", "any other", "approval", "once the profile names it in security.approved_env"))
    return rows

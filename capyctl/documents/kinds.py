"""Any document by its kind: what `validate config` and `config show` need to know of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capyctl.documents import owned, paths, reader, settings, strict
from capyctl.documents.custom_engine import MANIFEST_KIND, parse_manifest
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.paths import Row
from capyctl.errors import Refusal

KINDS = ("deployment", "standalone", "server", "host")
_LISTED = f"{', '.join(KINDS)} or {MANIFEST_KIND}"


def document_class(kind: str) -> type[Any]:
    """The class of a role document. Imported one by one: a command needs one of them."""
    if kind == "standalone":
        from capyctl.documents.standalone import Standalone

        return Standalone
    if kind == "server":
        from capyctl.documents.server import Server

        return Server
    from capyctl.documents.host import Host

    return Host


def read_file(path: str, called: str) -> dict[str, Any]:
    """The plain data of a document in a file. Raises: Refusal invalid_config."""
    raw = reader.read(owned.read_regular(path, reader.BYTES_MAX, called), called)
    if type(raw) is not dict:
        raise Refusal("invalid_config", f"{called}: expected a document with kind {_LISTED}")
    return raw


def kind_of(raw: Mapping[str, Any], called: str) -> str:
    """A document's kind; without one it is a deployment, whose kind may be left out."""
    kind = raw.get("kind", "deployment")
    if kind not in KINDS:
        near = strict.nearest(kind, (*KINDS, MANIFEST_KIND)) if isinstance(kind, str) else []
        hint = f" (did you mean {near[0]}?)" if near and near[0] != kind else ""
        raise Refusal("invalid_config", f"{called}: kind: {strict.shown(kind)}: expected {_LISTED}{hint}")
    return str(kind)


def is_deployment(raw: Mapping[str, Any]) -> bool:
    """Whether a document is a deployment: it says so, or has no kind."""
    return bool(raw.get("kind", "deployment") == "deployment")


def check(raw: dict[str, Any], called: str, overrides: Sequence[str] = ()) -> tuple[str, Any]:
    """The kind and the structured document, with `--set` laid over a role document.

    Raises: Refusal naming the document or the override at fault.
    """
    if raw.get("kind") == MANIFEST_KIND and not overrides:  # no role reads one as its document
        return MANIFEST_KIND, parse_manifest(raw, called)
    kind = kind_of(raw, called)
    if kind == "deployment":
        if overrides:
            raise Refusal("invalid_config", f"--set {overrides[0].partition('=')[0]}: a deployment has no settings")
        made: Deployment = parse_deployment(raw, called)
        return kind, made
    document = document_class(kind)
    statements = settings.from_overrides(document, overrides)
    return kind, paths.overlay(document, raw, statements, called)


def rows_of(role: str, path: str, overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[Row, ...]:
    """Every effective setting of a server's or host's document. Raises: Refusal as a start would."""
    raw = read_file(path, path)
    if kind_of(raw, path) != role:
        raise Refusal("invalid_config", f"{path}: kind: is {raw.get('kind')}; expected {role}")
    document = document_class(role)
    statements = [*settings.from_variables(document, environ), *settings.from_overrides(document, overrides)]
    made = paths.overlay(document, raw, statements, path)
    return paths.rows(made, raw, statements)

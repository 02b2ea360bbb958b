"""`model:` of a deployment: where the weights come from, in all the forms a document may use.

However it is written, a model becomes one `source` of three kinds, so nobody downstream sees the
short forms. Source: config 7.2.
"""

from __future__ import annotations

import os.path
import re
import urllib.parse
from typing import Any, Final, Literal

import attrs

from capyctl.documents import strict
from capyctl.documents.scalars import SecretRef
from capyctl.documents.strict import Wrong

COMMIT: Final = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_REPO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)


@attrs.frozen(kw_only=True)
class Local:
    """A directory: absolute, or below the host's models directory. `~/…` only until the CLI expanded it."""

    path: str
    type: Literal["local"] = "local"

    def __attrs_post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or len(self.path) > 4096 or not self.path.isprintable() or ".." in parts:
            raise Wrong(("path",), "expected a directory's path without '..' or control characters", "invalid_config")
        if self.path in (".", "/", "~", "~/"):
            raise Wrong(("path",), f"{strict.shown(self.path)} is not one model's directory")

    @property
    def needs_home(self) -> bool:
        return self.path.startswith("~")


@attrs.frozen(kw_only=True)
class HuggingFace:
    """A repository of a Hub at one commit. `revision` is a branch, a tag or None until the CLI pinned it."""

    repo: str
    revision: str | None = None
    token_ref: SecretRef | None = None
    type: Literal["huggingface"] = "huggingface"

    def __attrs_post_init__(self) -> None:
        if not _REPO.fullmatch(self.repo) or ".." in self.repo:
            raise Wrong(("repo",), f"{strict.shown(self.repo)}: expected owner/name")
        if self.revision is not None and (not _REVISION.fullmatch(self.revision) or ".." in self.revision):
            raise Wrong(("revision",), f"{strict.shown(self.revision)}: expected a commit, branch or tag")

    @property
    def pinned(self) -> bool:
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None


@attrs.frozen(kw_only=True)
class Http:
    """One file behind a URL, or behind a URL that the host keeps as a secret, with its digest."""

    sha256: str
    url: str | None = None
    url_ref: SecretRef | None = None
    archive: Literal["tar"] | None = None
    type: Literal["http"] = "http"

    def __attrs_post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise Wrong(("sha256",), "expected 64 lower-case hexadecimal digits")
        if (self.url is None) == (self.url_ref is None):
            raise Wrong((), "expected either url or url_ref")
        if self.url is not None:
            _check_url(self.url)


Source = Local | HuggingFace | Http
_KINDS: Final[dict[str, type[Any]]] = {"local": Local, "huggingface": HuggingFace, "http": Http}


@attrs.frozen(kw_only=True)
class Model:
    """What is served: its source, a label, the expected digest, and a drafter's weights beside it."""

    source: Source
    revision: str = "1"
    content_fingerprint: str = "measured"
    draft: Source | None = None

    @property
    def expected_digest(self) -> str | None:
        """The digest the whole directory must have, or None: other text is a label."""
        return self.content_fingerprint if self.content_fingerprint.startswith("sha256:") else None

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source,) if self.draft is None else (self.source, self.draft)

    def expanded(self, home: str) -> Model:
        """With `~/` read as `home`; only the CLI knows whose home is meant."""

        def expand(source: Source) -> Source:
            if isinstance(source, Local) and source.path.startswith("~/"):
                return attrs.evolve(source, path=os.path.join(home, source.path[2:]))
            return source

        return attrs.evolve(self, source=expand(self.source), draft=None if self.draft is None else expand(self.draft))

    def check_settled(self) -> None:
        """Refuse what only the CLI may still hold: `~/` and references without a commit. Raises Wrong.

        The fields are those above every form that a source may be written in.
        """
        for at, source in ((), self.source), (("draft",), self.draft):
            if isinstance(source, Local) and source.needs_home:
                raise Wrong(at, f"{strict.shown(source.path)}: ~ was not expanded; write the absolute path")
            if isinstance(source, HuggingFace) and not source.pinned:
                named = source.repo if source.revision is None else f"{source.repo}@{source.revision}"
                raise Wrong(
                    at,
                    f"{named} is not pinned to a commit, and the Hub is not asked here. `capyctl deploy model` takes "
                    f"it as it is and pins it to today's commit; or write {source.repo}@<40 hexadecimal digits>",
                )


def shown_url(url: str) -> str:
    """A URL as it may be printed: a user, a query or a fragment may be a credential."""
    parts = urllib.parse.urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    host = parts.hostname or "-"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{parts.path}"


def _check_url(url: str) -> None:
    form = "expected an http(s):// URL without user or fragment"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise Wrong(("url",), form) from None
    # The URL itself stays out of the message: its query may be a credential.
    if parts.scheme not in ("https", "http") or not host or parts.username is not None or parts.fragment:
        raise Wrong(("url",), form)
    if not url.isascii() or not url.isprintable() or " " in url or len(url) > 4096:
        raise Wrong(("url",), form)


def _source(value: Any) -> Source:
    """A source: text, `{type: …}`, `{path: …}`, `{hf: …}`, `{local: {…}}`, `{huggingface: {…}}` or `{http: {…}}`."""
    if isinstance(value, str):
        _check_no_address(value)
        return Local(path=value)
    if type(value) is not dict:
        raise Wrong((), f"expected a directory, or a block with hf, http or source, not {strict.shown(value)}")
    if "type" in value:
        kind = value["type"]
        if not isinstance(kind, str) or kind not in _KINDS:
            raise Wrong(("type",), f"{strict.shown(kind)} is not allowed; expected {' or '.join(_KINDS)}")
        return _typed(value, kind)
    if len(value) == 1:
        ((name, inner),) = value.items()
        if name in _KINDS:
            try:
                return _typed({"type": name, **inner} if type(inner) is dict else inner, name)
            except Wrong as wrong:
                raise wrong.under(name) from None
        if name == "hf":
            return _hub(inner)
        if name == "path":
            return _typed({"type": "local", "path": inner}, "local")
    if "url" in value or "url_ref" in value:
        return _typed({"type": "http", **value}, "http")
    raise Wrong((), "expected one of path, hf, local, huggingface or http, or a type")


def _check_no_address(text: str) -> None:
    """Refuse text that means something else than a directory, with the form of what it means. Raises Wrong."""
    scheme, colon, rest = text.partition(":")
    if scheme in ("http", "https") and rest.startswith("//"):
        # The URL itself stays out of the message: its query may be a credential.
        form = "{http: {url: <URL>, sha256: <64 hexadecimal digits>}}"
        raise Wrong((), f"a model behind a URL is written {form}; text alone is a directory")
    if colon and scheme in ("hf", "huggingface"):
        repo = rest.removeprefix("//").strip()
        named = repo if _REPO.fullmatch(repo.partition("@")[0]) else "owner/name"
        raise Wrong((), f"a model of a Hub is written {{hf: {named}}}; text alone is a directory")
    if rest.startswith("//"):
        raise Wrong(
            (), f"{strict.shown(scheme)} is not downloaded from; expected a directory, {{hf: …}} or {{http: …}}"
        )


def _typed(value: Any, kind: str) -> Source:
    made: Source = strict.structure_raw(value, _KINDS[kind])
    return made


def _hub(value: Any) -> HuggingFace:
    if not isinstance(value, str):
        raise Wrong(("hf",), f"expected owner/repo or owner/repo@commit, not {strict.shown(value)}")
    repo, at, revision = value.partition("@")
    try:
        return HuggingFace(repo=repo, revision=revision if at else None)
    except Wrong as wrong:
        raise Wrong(("hf",), wrong.message) from None


_SHORT: Final = ("path", "hf", "url", "url_ref", "sha256", "archive", *_KINDS)


def _model(value: Any, _: Any) -> Model:
    """Hook: text, `{hf: …}`, `{path: …}` or `{source: …}`, each beside revision, content_fingerprint and draft."""
    if isinstance(value, str):
        return Model(source=_under("source", value) if not value else _source(value))
    if type(value) is not dict:
        raise Wrong((), f"expected a directory or a block, not {strict.shown(value)}")
    rest = dict(value)
    if "source" in rest:
        if any(name in rest for name in _SHORT):
            raise Wrong((), "states its source twice: keep `source`, or the short form")
        source = _under("source", rest.pop("source"))
    else:
        short = {name: rest.pop(name) for name in list(rest) if name in _SHORT}
        if not short:
            _refuse_unknown(rest)
            raise Wrong((), "has no source; state a path, hf: owner/repo, http, or source")
        source = _source(short)
    _refuse_unknown(rest)
    given: dict[str, Any] = {}
    for name in ("revision", "content_fingerprint"):
        if name in rest:
            given[name] = _text(name, rest[name])
    fingerprint = given.get("content_fingerprint", "measured")
    if fingerprint.startswith("sha256:") and not _SHA256.fullmatch(fingerprint.removeprefix("sha256:")):
        raise Wrong(("content_fingerprint",), "expected sha256: and 64 lower-case hexadecimal digits, or a label")
    if "draft" in rest:
        given["draft"] = _under("draft", rest["draft"])
    return Model(source=source, **given)


def _refuse_unknown(rest: dict[str, Any]) -> None:
    known = ("source", "revision", "content_fingerprint", "draft", "path", "hf", "http")
    for name in rest:
        if name not in known:
            near = strict.nearest(name, (*known, *_SHORT))
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(known)}"
            raise Wrong((name,), f"is not a field here; {hint}")


def _under(name: str, value: Any) -> Source:
    try:
        return _source(value)
    except Wrong as wrong:
        raise wrong.under(name) from None


def _text(name: str, value: Any) -> str:
    try:
        text = strict.structure_raw(value, str)
    except Wrong as wrong:
        raise wrong.under(name) from None
    if not text or len(text) > 256 or not text.isprintable():
        raise Wrong((name,), "expected one line of printable text, at most 256 characters")
    return text


strict.register(Model, _model)

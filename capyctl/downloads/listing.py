"""What a source consists of: the files of a Hub's repository at one commit, or the one file behind a URL.

The Hub's own library says how a Hub is asked and what it answered; every byte of it goes through our door, which
judges addresses and redirects. It is imported when the first Hub is asked: it takes a third of a second.
Source: config 7.2; security 7, F16.
"""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import attrs

from capyctl.checkpoints import bounded_json, sources
from capyctl.documents.model_source import COMMIT, Http, HuggingFace, shown_url
from capyctl.downloads.door import Door, Interrupted, Line, Stopped
from capyctl.downloads.tokens import Tokens
from capyctl.errors import CapyError, Refusal

LISTING_MAX: Final = 16 << 20
FILES_MAX: Final = 8192
FILE_BYTES_MAX: Final = 1 << 50
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_log: Final = logging.getLogger("capyctl.downloads")
_line: contextvars.ContextVar[Line] = contextvars.ContextVar("line")
_library_lock: Final = threading.Lock()
_speaks_through: Final[list[tuple[Door, str]]] = []  # the library has one client per process


@attrs.frozen(kw_only=True)
class RemoteFile:
    """One file to fetch. `path` is relative and safe. `called` is its URL as it may be printed.

    `sha256`, or for small files of a repository `git_blob`, is what it must hash to. `size_bytes` None: the server
    says it when asked. `secret`: no part of the URL is printed, nor of where it leads, but for hosts.
    """

    path: str
    url: str = attrs.field(repr=False)
    called: str
    size_bytes: int | None
    sha256: str | None = None
    git_blob: str | None = None
    token: str | None = attrs.field(default=None, repr=False)
    secret: bool = False


@attrs.frozen(kw_only=True)
class Asking:
    """Finds out what a source consists of. `endpoint`: the Hub's address without a slash at its end."""

    door: Door
    tokens: Tokens
    endpoint: str

    def files(self, source: HuggingFace | Http, wanted: sources.Wanted, line: Line) -> list[RemoteFile]:
        """The files of a source.

        Raises: Refusal as the door, the tokens and `sources.choose` say; Interrupted; Stopped.
        """
        if isinstance(source, Http):
            return [self._one(source)]
        token = self.tokens.hub(source.token_ref)
        found = _siblings(self.door, self.endpoint, source, token, line)
        chosen = sources.choose(source.repo, list(found), wanted)
        return [attrs.evolve(found[name], token=token) for name in chosen]

    def check(self, source: HuggingFace | Http) -> None:
        """Refuse what `files` would refuse before anybody is asked and any secret is read. Raises: Refusal."""
        if isinstance(source, HuggingFace):
            self.door.check(self.endpoint)
        elif source.url is not None:
            self.door.check(self._one(source).url)

    def name_of(self, source: Http) -> str:
        """What a lone file is to be called. Raises: Refusal as above."""
        return self._one(source).path

    def _one(self, source: Http) -> RemoteFile:
        if source.archive is not None:
            raise Refusal("unsupported", "model.source.archive: archives are not unpacked; name one file")
        if source.url is not None:
            url, called = source.url, shown_url(source.url)
        else:
            assert source.url_ref is not None
            url, called = self.tokens.url(source.url_ref), f"the URL of {source.url_ref}"
        try:
            name = sources.file_name(url)
        except ValueError:
            raise Refusal("not_materializable", f"{called}: it is no URL") from None
        if not sources.FILE_NAME.fullmatch(name):
            raise Refusal("unsafe_file", f"{called}: its path does not end in a file's name, such as model.gguf")
        return RemoteFile(
            path=name, url=url, called=called, size_bytes=None, sha256=source.sha256, secret=source.url is None
        )


def _siblings(
    door: Door, endpoint: str, source: HuggingFace, token: str | None, line: Line
) -> Mapping[str, RemoteFile]:
    """Every file of a repository at its commit, by name."""
    hub = _library(door, endpoint)
    held = _line.set(line)
    try:
        api = hub.HfApi(endpoint=endpoint, token=token or False, library_name="capyctl")
        info = api.model_info(source.repo, revision=source.revision, files_metadata=True)
        rows = [_file(hub, endpoint, source, row) for row in info.siblings or ()]
        commit = info.sha
    except (CapyError, Interrupted, Stopped):
        raise
    except Exception as wrong:  # whatever else the library may raise over an answer that is not a Hub's
        _log.warning("download.not_a_hub", extra={"fields": {"repo": source.repo, "error": type(wrong).__name__}})
        raise Refusal(
            "not_materializable",
            f"{endpoint} does not answer as a Hub does about {source.repo}; "
            "host.model_sources.huggingface_endpoint must be a Hub's own address",
        ) from None
    finally:
        _line.reset(held)
    if commit != source.revision or COMMIT.fullmatch(str(commit)) is None:
        raise Refusal(
            "not_materializable", f"{endpoint} answered for another commit of {source.repo} than was asked for"
        )
    found = {row.path: row for row in rows}
    if len(found) != len(rows):
        raise Refusal("unsafe_file", f"{source.repo} lists a file twice")
    for path in found:
        below = next((str(above) for above in PurePosixPath(path).parents if str(above) in found), None)
        if below is not None:
            raise Refusal("unsafe_file", f"{source.repo} lists {below} as a file and as a directory")
    return found


def _file(hub: Any, endpoint: str, source: HuggingFace, row: Any) -> RemoteFile:
    """One row of the Hub's answer. Raises: Refusal `unsafe_file`, `not_materializable`."""
    path = row.rfilename
    check_name(path, source.repo)
    size = row.size if row.lfs is None else row.lfs.size
    sha256 = None if row.lfs is None else row.lfs.sha256
    good = type(size) is int and 0 <= size <= FILE_BYTES_MAX
    hashed = _SHA256.fullmatch(str(sha256)) if sha256 is not None else COMMIT.fullmatch(str(row.blob_id))
    if not good or hashed is None:
        raise Refusal("not_materializable", f"{endpoint} does not say size and hash of {path} of {source.repo}")
    url = hub.hf_hub_url(source.repo, path, revision=source.revision, endpoint=endpoint)
    return RemoteFile(
        path=path,
        url=url,
        called=shown_url(url),
        size_bytes=size,
        sha256=sha256,
        git_blob=None if sha256 is not None else row.blob_id,
    )


def _check_bounded(body: bytes, url: str) -> None:
    """Refuse what would fill the memory, before the library makes objects of it."""
    try:
        said = bounded_json.parse(body)
    except bounded_json.WrongJson as wrong:
        raise Refusal("not_materializable", f"the answer of {url} {wrong}") from None
    files = said.get("siblings") if isinstance(said, dict) else None
    if isinstance(files, list) and len(files) > FILES_MAX:
        raise Refusal("too_large", f"the answer of {url} lists more than {FILES_MAX} files")


def check_name(path: object, repo: str) -> None:
    """Refuse a name that would leave the directory, or that a terminal or a file system would not bear."""
    parts = path.split("/") if isinstance(path, str) else []
    bad = not parts or not str(path).isprintable()
    bad = bad or any(part in ("", ".", "..") or len(part.encode()) > 200 for part in parts)
    if bad or len(str(path).encode()) > 1024 or len(parts) > 12 or "\\" in str(path):
        raise Refusal("unsafe_file", f"{repo} lists a file with a name that is not used: {ascii(path)[:120]}")


def _library(door: Door, endpoint: str) -> Any:
    """The Hub's library, told to speak through our door. Any: it is imported when it is needed."""
    with _library_lock:
        import httpx2
        import huggingface_hub
        from huggingface_hub import constants

        if _speaks_through:
            if _speaks_through[0] == (door, endpoint):
                return huggingface_hub
            _speaks_through.clear()

        class Through(httpx2.BaseTransport):
            """One request of the library, asked by the door. Redirects are followed there."""

            def handle_request(self, request: httpx2.Request) -> httpx2.Response:
                if not str(request.url).startswith(f"{endpoint}/"):
                    raise Refusal("not_materializable", "the Hub's library asked another host than its Hub")
                secret = request.headers.get("Authorization", "").removeprefix("Bearer ") or None
                with door.open(str(request.url), _line.get(), token=secret) as answer:
                    body = answer.whole(LISTING_MAX)
                    said = answer.headers.get("Content-Type", "application/json")
                _check_bounded(body, answer.url)
                # No other header is handed on: it could tell the library to unpack the body.
                return httpx2.Response(answer.status, headers={"Content-Type": said}, content=body)

        # It would count its users, and look up once a day what it might be run by.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=Through(), trust_env=False))
        _speaks_through.append((door, endpoint))
        return huggingface_hub

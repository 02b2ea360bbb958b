"""Where a downloaded model lies, and which of a repository's files an engine needs. Pure.

The place is a function of what is asked for alone: a source at a commit, and which of its files. So two deployments
that ask for the same share one directory, a directory is complete or is not there, and a host without network finds
what it has. Places are below `sources/` of the host's download directory.
Source: config 5.2, 7.2; engines 9.1.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import attrs

from capyctl.checkpoints.directory import Listing, ModelFile, pick_gguf
from capyctl.documents.deployment import Deployment
from capyctl.documents.model_source import Http, HuggingFace, Local, Source
from capyctl.errors import Refusal

SOURCES: Final = "sources"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5", ".joblib", ".npy", ".npz")
"""Weights that run code when they are read, or that no engine here reads: never asked for."""
_BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".jsonl")
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
"""What a lone file may be called."""
_WORD_MAX: Final = 150  # with a hash, what shortens it and a dash below the 255 bytes of a file system
_REPEATED: Final = "consolidated"  # some makers publish the same weights a second time under this name


@attrs.frozen(kw_only=True)
class Wanted:
    """Which files of a repository: `gguf` (one model, perhaps named), `tensors` or every file that is not a pickle.

    `code`: the Python files of a model whose deployment trusts them.
    """

    kind: Literal["gguf", "tensors", "files"]
    gguf_file: str | None = None
    mmproj_file: str | None = None
    code: bool = False

    @property
    def word(self) -> str:
        """One directory name per choice."""
        if self.gguf_file is None and self.mmproj_file is None:
            return f"{self.kind}-code" if self.code else self.kind
        named = json.dumps([self.gguf_file, self.mmproj_file]).encode()
        return f"{self.kind}-{hashlib.sha256(named).hexdigest()[:12]}"


def wanted_of(document: Deployment, family: str) -> Wanted:
    """What an engine of `family` needs for this deployment."""
    if family == "custom":
        return Wanted(kind="files")
    if family != "llamacpp":
        return Wanted(kind="tensors", code=document.engine_config.trust_remote_code)
    block = document.engine_config.llamacpp
    if block is None:
        return Wanted(kind="gguf")
    return Wanted(kind="gguf", gguf_file=block.gguf_file, mmproj_file=block.mmproj_file)


def place_of(source: HuggingFace | Http, wanted: Wanted) -> str:
    """Where it lies, relative to the download directory.

    A file behind a URL lies by its name as well: engines go by it, so another name is another model directory. Of a
    URL that is a secret the name is not known here; its place is the secret's.
    """
    if isinstance(source, Http):
        return f"{SOURCES}/http/{_http_word(source)}-{source.sha256}"
    return f"{SOURCES}/huggingface/{source.repo}/{source.revision}/{wanted.word}"


def file_name(url: str) -> str:
    """What the file behind a URL is called, as the URL says it. FILE_NAME says whether that may be used."""
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])


def _http_word(source: Http) -> str:
    """The legible part of a lone file's place: other names have other ones."""
    if source.url is None:
        return f"_{str(source.url_ref).removeprefix('secret://')}"
    name = file_name(source.url)
    if FILE_NAME.fullmatch(name) and len(name) <= _WORD_MAX:
        return name
    told_apart = hashlib.sha256(name.encode()).hexdigest()[:24]
    return f"{name[:_WORD_MAX]}-{told_apart}" if FILE_NAME.fullmatch(name) else f"_-{told_apart}"


def fetched(document: Deployment, family: str) -> tuple[tuple[HuggingFace | Http, Wanted], ...]:
    """The sources of a deployment that a host must fetch, with what is wanted of each."""
    wanted = wanted_of(document, family)
    return tuple((source, wanted) for source in document.model.sources if not isinstance(source, Local))


def placed(document: Deployment, family: str, download_dir: str) -> Deployment:
    """The deployment as a host finds it once everything is fetched: every source is a directory."""

    def local(source: Source) -> Local:
        if isinstance(source, Local):
            return source
        return Local(path=f"{download_dir.rstrip('/')}/{place_of(source, wanted_of(document, family))}")

    model = document.model
    draft = None if model.draft is None else local(model.draft)
    return attrs.evolve(document, model=attrs.evolve(model, source=local(model.source), draft=draft))


def choose(repo: str, names: Sequence[str], wanted: Wanted) -> list[str]:
    """Which of a repository's files are wanted, in order.

    Raises: Refusal `checkpoint_unusable` when what is wanted is not there, or is ambiguous.
    """
    if wanted.kind == "gguf":
        return _gguf(repo, names, wanted)
    usable = [name for name in names if not name.lower().endswith(PICKLES) and not _hidden(name)]
    if wanted.kind == "files":
        return sorted(usable)
    weights = [name for name in usable if name.endswith(".safetensors") and "/" not in name]
    first = [name for name in weights if not name.startswith(_REPEATED)] or weights
    if not first:
        pickled = any(name.lower().endswith(PICKLES) for name in names)
        why = "it has weights as pickles alone, which are never asked for" if pickled else "it has none"
        raise Refusal("checkpoint_unusable", f"{repo} has no .safetensors files: {why}")
    # Sentence transformers keep pooling and dense layers in directories of their own, which this file lists.
    deep = "modules.json" in names
    beside = [
        name
        for name in usable
        if (name.endswith(_BESIDE) or (wanted.code and name.endswith(".py"))) and ("/" not in name or deep)
    ]
    beside += [name for name in usable if name.endswith(".jinja") and "/" in name and not deep]
    inner = [name for name in usable if deep and name.endswith(".safetensors") and name.count("/") == 1]
    return sorted({*first, *beside, *(name for name in inner if not name.startswith(("onnx/", "openvino/")))})


def _gguf(repo: str, names: Sequence[str], wanted: Wanted) -> list[str]:
    found = [name for name in names if name.endswith(".gguf")]
    projectors = [name for name in found if "mmproj" in PurePosixPath(name).name.lower()]
    if wanted.mmproj_file is None and len(projectors) > 1:
        found = [name for name in found if name not in projectors]  # nobody said which: it answers text
    pick = pick_gguf(
        Listing(directory=Path(repo), files=tuple(_named(name) for name in found)), wanted.gguf_file, wanted.mmproj_file
    )
    return list(pick.weights)


def _named(name: str) -> ModelFile:
    return ModelFile(path=name, real=Path(name), size_bytes=0, mtime_ns=0, ctime_ns=0, device=0, inode=0)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))

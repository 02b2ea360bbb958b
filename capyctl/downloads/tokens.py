"""Secrets of downloads: a Hub's token, and addresses that are secrets themselves. Read when they are needed.

They come from owner-only files or from the role's environment, and appear in no message. Source: security 3, F11, F12;
config 7.2, 10.3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

import attrs

from capyctl.documents import places
from capyctl.documents.scalars import SecretRef
from capyctl.errors import Refusal

VARIABLES: Final = ("CAPYCTL_HF_TOKEN", "HF_TOKEN")
BYTES_MAX: Final = 4096
_SETTING: Final = "host.model_sources.huggingface_token_file"
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,512}", re.ASCII)


@attrs.frozen(kw_only=True)
class Tokens:
    """Where this role's secrets are.

    Args:
      token_file: the Hub token's file, used when no variable holds one.
      secrets_dir: holds the files that `secret://<name>` names.
    """

    environ: Mapping[str, str] = attrs.field(repr=False, factory=dict)
    token_file: str | None = None
    secrets_dir: str

    def hub(self, reference: SecretRef | None) -> str | None:
        """The token for a Hub, or None. Raises: Refusal `unauthorized` naming where it is and what is wrong there."""
        if reference is not None:
            return self._token(self._named(reference), reference)
        for variable in VARIABLES:
            stated = self.environ.get(variable, "").strip()
            if stated:
                return _checked(stated, variable)
        return None if self.token_file is None else self._token(self.token_file, _SETTING)

    def url(self, reference: SecretRef) -> str:
        """The address in a secret's file. Raises: Refusal as above."""
        return self._read(self._named(reference), reference)

    def _named(self, reference: SecretRef) -> str:
        return os.path.join(self.secrets_dir, reference.removeprefix("secret://"))

    def _token(self, path: str, called: str) -> str:
        return _checked(self._read(path, called), f"{called} ({path})")

    def _read(self, path: str, called: str) -> str:
        try:
            text = places.read_owned(path, BYTES_MAX).strip()
        except FileNotFoundError:
            raise Refusal("unauthorized", f"{called}: there is no file {path}. Write it, with mode 600") from None
        if not text:
            raise Refusal("unauthorized", f"{called}: the file {path} is empty")
        return text


def _checked(text: str, called: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise Refusal("unauthorized", f"{called} holds no token: expected one word of printable ASCII")
    return text


def from_environment(environ: Mapping[str, str]) -> str | None:
    """The token that a client command's own environment holds, or None. Raises: Refusal `unauthorized`."""
    return Tokens(environ=environ, secrets_dir="").hub(None)

"""Downloads over TLS: believed when the machine believes the certificate, and never left for plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.certificates import write_certificate
from tests.hub.hub import Fault, Hub, running

from .test_fetch import FILES, REPO, WEIGHTS, Here


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    public, context = write_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(public))
    with running({REPO: dict(FILES)}, tls=context) as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, hub: Hub) -> Here:
    root = tmp_path / "models"
    root.mkdir()
    return Here(root, hub)


def test_an_authority_of_the_organisation_is_believed(here: Here, hub: Hub):
    assert hub.endpoint.startswith("https://localhost:")
    assert (here.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_certificate_that_the_machine_does_not_trust_is_refused(
    here: Here, hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SSL_CERT_FILE")
    wrong = here.refused()
    assert (wrong.code, "its certificate is not trusted" in wrong.message) == ("not_materializable", True)
    assert not hub.seen


def test_a_redirect_to_plain_http_is_not_followed(here: Here, hub: Hub):
    hub.faults["model.safetensors"] = [Fault(redirect=hub.cdn.replace("https", "http"))]
    assert "redirects to plain HTTP" in here.refused().message
    assert len(hub.to("cdn")) == 1

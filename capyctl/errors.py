"""The closed list of error codes, and the one hierarchy of exceptions that carries them.

In the pure core an expected refusal is a value; these exceptions live at the edges. Code, exit
status, HTTP status and retryability are attributes looked up here, never guessed from text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs


@attrs.frozen
class Code:
    """What one stable code means to a shell (exit status) and to an HTTP client (status)."""

    name: str
    exit: int
    http: int
    retryable: bool = False


def _codes(*rows: tuple[str, int, int, bool]) -> dict[str, Code]:
    return {name: Code(name, exit_, http, retry) for name, exit_, http, retry in rows}


# One row per code: name, exit status of the CLI, HTTP status, whether the same call may succeed later.
CODES: dict[str, Code] = _codes(
    # documents, options, arguments
    ("invalid_config", 2, 400, False),
    ("invalid_request", 2, 400, False),
    ("not_found", 2, 404, False),
    ("method_not_allowed", 2, 405, False),
    ("request_timeout", 13, 408, True),
    ("body_too_large", 2, 413, False),
    ("api_mismatch", 2, 400, False),
    ("cache_salt_unsupported", 2, 400, False),
    ("revision_conflict", 2, 409, False),
    ("route_conflict", 2, 409, False),
    ("idempotency_conflict", 2, 409, False),
    ("lifecycle_conflict", 2, 409, True),
    ("device_policy_mismatch", 2, 409, False),
    ("missing_system_allocation", 2, 400, False),
    ("checkpoint_unusable", 2, 409, False),
    ("checkpoint_mismatch", 2, 409, False),
    ("host_name_changed", 2, 409, False),
    ("engine_env_reserved", 2, 400, False),
    ("engine_env_not_approved", 2, 400, False),
    ("engine_env_conflict", 2, 400, False),
    ("invalid_root", 13, 409, False),
    ("unsafe_file", 13, 409, False),
    ("too_large", 13, 409, False),
    ("not_materializable", 13, 409, False),
    # authority
    ("unauthorized", 3, 401, False),
    # memory and devices
    ("insufficient_resources", 4, 503, True),
    ("insufficient_memory", 4, 503, True),
    ("insufficient_device_memory", 4, 409, False),
    ("insufficient_space", 4, 409, True),
    ("device_unobserved", 4, 503, True),
    ("stale_observation", 4, 503, True),
    ("parked_capacity", 4, 409, True),
    ("port_conflict", 4, 503, True),
    ("startup_requires_empty_host", 4, 409, True),
    ("device_conflict", 7, 409, True),
    ("category_limit", 8, 409, True),
    ("topology_unknown", 11, 503, True),
    ("no_safe_estimate", 12, 400, False),
    ("host_ineligible", 15, 409, True),
    # what this release or machine cannot do
    ("unsupported", 5, 400, False),
    ("unsupported_capability", 5, 409, False),
    ("capability_missing", 5, 409, False),
    ("residency_tier", 5, 409, False),
    ("host_capability_missing", 5, 409, False),
    ("store_from_newer_version", 5, 500, False),
    ("multi_gpu_unsupported", 5, 400, False),
    ("unsupported_gpu_topology", 5, 400, False),
    ("host_backed_unavailable", 5, 409, False),
    # state not known, or not yet
    ("unreconciled", 6, 409, True),
    ("checkpoint_digest_pending", 6, 409, True),
    ("activation_timeout", 10, 503, True),
    ("still_stopping", 25, 409, True),
    ("delete_requires_cleanup", 25, 409, True),
    # failures
    ("internal", 13, 500, False),
    ("operation_failed", 13, 500, False),
    ("launch_failed", 13, 503, True),
    ("activation_failed", 13, 503, True),
    ("engine_argument_rejected", 13, 503, False),
    ("effective_args_mismatch", 13, 503, False),
    ("engine_config_file", 13, 503, False),
    ("installation_drift", 13, 503, False),
    ("plugin_closure_failed", 13, 503, False),
    ("not_quiescent", 13, 409, True),
    ("wake_mismatch", 13, 503, True),
    ("unavailable", 13, 503, True),
    ("queue_full", 13, 429, True),
    ("deployment_stopped", 13, 409, False),
    ("deployment_inactive", 13, 409, False),
    ("deadline_exceeded", 13, 504, True),
    ("engine_rejected", 13, 400, False),
    ("engine_error", 13, 502, False),
    ("engine_unreachable", 13, 502, False),
    ("host_revoked", 14, 403, False),
    # engine registration
    ("engine_not_found", 16, 404, False),
    ("engine_unsupported", 17, 400, False),
    ("engine_version_failed", 18, 400, False),
    ("profile_exists", 19, 409, False),
    ("profile_in_use", 20, 409, True),
    ("publish_rejected", 21, 409, False),
    ("agent_unreachable", 22, 503, True),
    ("not_interactive", 23, 400, False),
    ("profile_not_published", 24, 409, False),
    ("toolchain_missing", 26, 400, False),
)


def lookup(code: str) -> Code:
    """The row of `code`; a detail after a colon (`engine_env_reserved:PATH`) is allowed.

    Raises: KeyError for a code that is not on the list.
    """
    return CODES[code.partition(":")[0]]


class CapyError(Exception):
    """An error with a stable code. Subclasses say what the caller may conclude.

    `message` is one line that names what was asked, what is in the way and what to do next; it
    holds no secret and no prompt. `details` are figures for `--json`.
    """

    conclusion: ClassVar[str] = "unknown"

    def __init__(
        self, code: str, message: str, *, details: Mapping[str, Any] | None = None, retryable: bool | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        row = lookup(code)
        self.code = code
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.exit_code = row.exit
        self.http_status = row.http
        self.retryable = row.retryable if retryable is None else retryable

    def of(self, source: str) -> Self:
        """The same error, its line beginning with the document or place that it is about."""
        return type(self)(self.code, f"{source}: {self.message}", details=self.details, retryable=self.retryable)


def shown_details(value: Any) -> Any:
    """Details as JSON has them: integers are decimal strings, at every depth."""
    if isinstance(value, Mapping):
        return {name: shown_details(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [shown_details(one) for one in value]
    return str(value) if type(value) is int else value


class Refusal(CapyError):
    """Nothing happened; change the request, or the state it met, and ask again."""

    conclusion = "nothing happened"


class Failure(CapyError):
    """It was tried and failed, and what it left behind is proven clean."""

    conclusion = "tried, failed, proven clean"


class Lost(CapyError):
    """Nobody knows whether it happened; state and charge are kept."""

    conclusion = "nobody knows"


class InvariantBroken(AssertionError):
    """A state that cannot be. Our bug: the lane stops, keeps its charges and says so."""


def check(holds: bool, claim: str) -> None:
    """Raise InvariantBroken naming `claim` unless it holds."""
    if not holds:
        raise InvariantBroken(f"not so: {claim}")

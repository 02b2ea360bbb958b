"""How long a cold start and a wake may take, from the weights and what the document states. Pure.

Source: engines 12.2.
"""

from __future__ import annotations

from capyctl.documents.deployment import Deployment
from capyctl.fsm.types import Millis

FIRST_START_MS = 480_000
"""What a first start of vLLM or SGLang may take beside its weights: kernels are compiled and tuned."""
TENSORFOLD_START_MS = 1_800_000


def limits(
    document: Deployment, weights: int, host_deadline_ms: int | None, *, family: str, built: bool = False
) -> tuple[Millis, Millis]:
    """Time limits of a cold start and of a wake, milliseconds. Source: engines 12.2.

    Args:
      built: a launch before has compiled what the family compiles on its first start.
    """
    deadline = document.request_deadline.ms if document.request_deadline is not None else host_deadline_ms

    def bounded(derived: int, most: int) -> Millis:
        return Millis(min(derived, most, deadline if deadline is not None else most))

    stated = document.timeouts
    derived = 120_000 + weights * 10_000 // 10**9
    if family in ("vllm", "sglang"):
        derived += FIRST_START_MS
    initialize = bounded(derived, 1_800_000)
    if family == "tensorfold" and not built:
        # It compiles its kernels at the first start, and waits for that longer than a request may elsewhere.
        least = TENSORFOLD_START_MS if document.request_deadline is None else document.request_deadline.ms
        initialize = Millis(min(TENSORFOLD_START_MS, least))
    wake = bounded(60_000 + weights * 5_000 // 10**9, 900_000)
    return (
        Millis(stated.initialize.ms) if stated.initialize is not None else initialize,
        Millis(stated.wake.ms) if stated.wake is not None else wake,
    )

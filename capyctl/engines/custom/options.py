"""A custom engine's options and variables: its options are nobody's here, so none is checked.

Source: engines 10.
"""

from __future__ import annotations

from capyctl.engines.environment import Reserved
from capyctl.engines.options import OptionPolicy

POLICY = OptionPolicy(family="custom", rules=(), gated_suffixes=(), equals=True, unchecked=True)

RESERVED_ENV: tuple[Reserved, ...] = ()
"""Beyond what every engine may not set, nothing is known of a custom engine."""

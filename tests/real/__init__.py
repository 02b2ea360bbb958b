"""Tests against engines that are too large for every run; each says what it needs and is skipped without it."""

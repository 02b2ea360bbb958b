"""Measurements against peers in the same run. They print ratios, since machines differ."""

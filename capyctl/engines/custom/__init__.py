"""Custom engines: any program with a manifest, confirmed once and pinned."""

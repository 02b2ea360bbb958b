"""SGLang: rendered by a protected entry, parked by its memory saver, aborted by request id."""

"""The documents people write, as attrs classes. Import from the modules: this package imports nothing."""

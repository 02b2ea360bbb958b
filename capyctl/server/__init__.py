"""What decides for the machines: the driver of the world, its store, the management API."""

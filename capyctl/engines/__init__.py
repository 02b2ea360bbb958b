"""Engine families: how they are found, registered, rendered and driven. One sub-package per family."""

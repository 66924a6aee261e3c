"""The operations, one file per family."""

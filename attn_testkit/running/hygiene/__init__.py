"""Hygiene of a backend's process: its state is compared, sealed and restored. The package imports neither plans nor
other processes."""

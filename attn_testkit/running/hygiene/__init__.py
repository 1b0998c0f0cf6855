"""Hygiene of a backend's process: its state is compared, sealed and restored. Knows no plan and no other process."""

"""What a backend's process is held to: compared, sealed, put back. Knows no plan and no other process."""

"""What is tried: cases and their ids, trees, schedules, slot layouts, data."""

"""Cases and their ids, trees, schedules, slot layouts, data."""

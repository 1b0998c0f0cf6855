"""Steps of a case: schedules, slots and data."""

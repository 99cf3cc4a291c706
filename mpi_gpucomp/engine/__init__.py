"""Runs schedules: tasks, their staging memory, and who turns the driver."""

"""Runs schedules: agreement, scheduling, progress and failure of calls, and their tasks."""

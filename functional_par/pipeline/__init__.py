"""Pipelines: schedules as data, and their execution."""

"""Forecasts of the planner beside speeds that users published."""

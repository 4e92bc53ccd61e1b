"""Forecasts as tables, also beside a comparison."""

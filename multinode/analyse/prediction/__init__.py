"""Predictions: the cost model, its calibration, scenarios, forecasts, break-even and back-test."""

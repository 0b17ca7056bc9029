"""Measures a running deployment and fits the cost model to what it did."""

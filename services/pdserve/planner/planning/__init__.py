"""Decides, for a workload and its objectives, how a number of engines is best used, by simulating every way."""

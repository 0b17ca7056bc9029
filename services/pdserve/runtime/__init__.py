"""Hosting: what every server process needs around its own work."""

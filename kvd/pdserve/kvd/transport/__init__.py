"""Ways to move bytes between two regions: a port and its adapters."""

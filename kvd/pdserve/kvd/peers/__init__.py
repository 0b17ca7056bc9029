"""Two nodes: the link between their daemons, and what each does for the other's engines."""

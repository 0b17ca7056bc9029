"""The connector's logic for both roles and both modes, free of any engine's types."""

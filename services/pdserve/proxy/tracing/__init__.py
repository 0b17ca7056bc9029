"""A request's record becomes its trace: which requests, which spans, which numbers. Pure but for the
process that does it (`child.py`) and the proxy's side of that (`process.py`, `apart.py`, `relief.py`)."""

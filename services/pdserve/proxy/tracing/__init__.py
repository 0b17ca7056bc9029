"""A request's record becomes its trace: which requests, which spans, which numbers. Pure but for the sink."""

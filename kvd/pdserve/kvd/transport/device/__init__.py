"""Device memory of other processes: `port` says what kvd needs of an accelerator, `gpu` gives it."""

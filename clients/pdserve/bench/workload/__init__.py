"""What is sent and when: arrivals, lengths, the named scenarios. Pure; randomness is an argument."""

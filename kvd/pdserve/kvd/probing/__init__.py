"""What `pdserve kvd doctor` asks of a daemon: transports measured over scratch memory, and what is to be said of it."""

"""What the system says about this machine; nothing is timed."""

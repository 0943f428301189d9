"""What happened: records, journal, console."""

"""What this machine can do, timed part by part."""

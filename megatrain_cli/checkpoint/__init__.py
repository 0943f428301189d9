"""What survives: model folders on disk."""

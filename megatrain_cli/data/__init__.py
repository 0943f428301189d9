"""What the model learns from: rows, tokens, labels, order."""

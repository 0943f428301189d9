"""How parameters change: learning rate, clipping, AdamW on tiles."""

"""Drawing token ids from logits: noise, logits processors, truncation, and the draw itself."""

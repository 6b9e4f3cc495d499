"""The plain pieces of a transformer around its linears: attention, norms, rotary positions, the loss."""

"""Which tensors and which GEMMs are to blame: a step replayed layer by layer, and what is seen in it."""

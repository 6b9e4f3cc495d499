"""Halfbyte: language-model pretraining in 4-bit NVFP4 with JAX, on the hardware people have."""

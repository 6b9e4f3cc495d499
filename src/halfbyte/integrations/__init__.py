"""Halfbyte's recipes in the trainers of other projects."""

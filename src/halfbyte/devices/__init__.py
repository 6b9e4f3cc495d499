"""Facts about accelerators, each with its source."""

"""Statistics of a controlled comparison: pure functions on arrays, without files or torch."""

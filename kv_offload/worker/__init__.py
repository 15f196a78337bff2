"""Whether it has moved: one per rank, beside its model runner. Imports no engine."""

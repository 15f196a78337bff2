"""What moves: one per engine, beside its scheduler. Imports no engine and no device code."""

"""How long steps and copies take, as measured, and what is expected of the next ones."""

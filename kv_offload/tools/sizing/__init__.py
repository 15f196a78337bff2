"""How many bytes a model's tokens take, from its config.json alone: no engine, no weights."""

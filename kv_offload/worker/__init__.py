"""A rank's half of the connector: it copies what the scheduler planned. Imports no engine."""

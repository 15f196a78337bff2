"""The worker side of the connector, one per rank, which runs planned copies. Imports no engine."""

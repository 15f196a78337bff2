"""One folder an engine: its hooks, and all that is known of it."""

"""What runs once, at the start of an engine: it checks the settings, builds a half and logs."""

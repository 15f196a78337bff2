"""The start of an engine: checks of the settings, construction of each half, logs."""

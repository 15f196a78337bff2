"""Starts an engine: checks the settings, builds each half of the connector, logs the setup."""

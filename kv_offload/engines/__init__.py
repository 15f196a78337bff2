"""Engine integrations: one folder per engine, with its hooks and everything specific to it."""

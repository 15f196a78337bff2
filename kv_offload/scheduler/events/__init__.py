"""Announcements about host memory and tiers to routers, independent of the engine."""

"""Stores, copies to host memory: `planner` plans them, with the help of the other modules."""

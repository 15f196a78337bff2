"""Hit ratios of a trace by policy and capacity, with upper bounds."""

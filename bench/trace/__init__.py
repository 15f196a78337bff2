"""Hit ratios of a trace by policy and capacity, beside what no policy can exceed."""

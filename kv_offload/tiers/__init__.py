"""The tiers below host memory: a local disk, a remote store that engines share, or both.

The scheduler uses `lower`. `promoter` decides which requests wait; `search` finds what can be read
for one of them, and those with the same prefix share `reads` and `questions`.
"""

"""The tiers below host memory: a local disk, a remote store that engines share, or both.

The scheduler uses `lower`. `promoter` decides which requests wait, and `search` finds the blocks
that a request can read. Requests that share a prefix share `reads` and `questions`.
"""

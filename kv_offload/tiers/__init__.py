"""The tiers below host memory: a local disk, a remote store that engines share, or both.

- `lower`: all tiers, as the scheduler sees them.
- `base`: the interface of a tier, its speed, and whether it may be read and written now.
- `disk`, `remote`: two kinds of tier. `directory` asks a remote store which blocks it has.
- `demoter`: writes blocks of host memory to a tier.
- `promoter`: decides which requests wait. `search` finds what can be read for a request; requests
  with the same prefix share `reads` and `questions`. `prefetcher` looks at queued requests.
"""

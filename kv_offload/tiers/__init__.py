"""The tiers below host memory: a local disk, a remote store that engines share, or both.

- `lower`: the tiers as the scheduler sees them.
- `base`: the keys of a tier, its speed, and whether it may be read and written now.
- `disk`, `remote`: the two kinds. `directory` asks a remote store which blocks it has.
- `demoter`: writes blocks of host memory to a tier.
- `promoter`: reads blocks that requests need. `prefetcher` has it look at queued requests.
"""

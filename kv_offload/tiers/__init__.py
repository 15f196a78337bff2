"""The tier below host memory: a local disk, or a remote store that engines share.

- `lower`: the tier as the scheduler sees it.
- `base`: the keys of a tier, and whether it may be read and written now.
- `disk`, `remote`: the two kinds.
- `demoter`: writes blocks of host memory to the tier.
- `promoter`: reads blocks that waiting requests need.
"""

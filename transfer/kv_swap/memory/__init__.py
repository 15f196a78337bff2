"""Host memory for slots: mapped, page-locked, placed on a NUMA node, shared between processes.

Nothing here imports `kv_swap.cuda` or `kv_swap.host`.
"""

"""Refuses invalid settings before the engine loads its weights.

vLLM builds connectors after loading the weights, which takes minutes for a large model. These
checks run in the process that reads the user's arguments. The connector repeats all of them,
because not every engine starts from arguments.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import TYPE_CHECKING

from kv_swap.cuda.device import import_cupy, make_kernel_cache
from kv_swap.errors import DeviceError

from kv_offload.config import trace_config
from kv_offload.config.checks import check_disk, check_recording, check_sizes
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.start import members, ranks, support, tiers
from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.errors import ConfigError, Problems, UnsupportedError
from kv_offload.worker.allocation import check_packing, transfer_kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def check_arguments(arguments: EngineArgs) -> None:
    """Raise `ConfigError` for the argument that makes vLLM replace the plugin."""
    size = arguments.kv_offloading_size
    if size is not None and members.asks_for_us(arguments.kv_transfer_config):
        raise ConfigError(
            f"--kv-offloading-size {size}: with it vLLM uses its own connector in place of the one "
            f"in --kv-transfer-config, which is {CONNECTOR}. Remove --kv-offloading-size and set "
            "cpu_bytes, or leave --kv-transfer-config out"
        )


def check_settings(vllm_config: VllmConfig) -> None:
    """Refuse settings that cannot work with any model, unless the engine runs on another host.

    Raises one `ConfigError`, `CapacityError` or `UnsupportedError` that reports all problems.
    """
    parallel = vllm_config.parallel_config
    elsewhere = parallel.use_ray or parallel.data_parallel_backend == "ray"
    if elsewhere or parallel.data_parallel_size_local == 0:
        return
    from vllm.platforms import current_platform

    for transfer, *enclosing in members.own_parts(vllm_config.kv_transfer_config):
        version = vllm_version()
        replicas = ranks.count_local_replicas(vllm_config).count
        traced = trace_config(transfer.kv_connector_extra_config, replicas=replicas)
        config = traced.config
        own = copy.copy(vllm_config)  # as a MultiConnector does for a member
        own.kv_transfer_config = transfer
        device = str(vllm_config.device_config.device_type)
        problems = Problems()
        with problems:
            check_sizes(traced)
            check_disk(traced)
        with problems:
            support.check_supported(own, version, enclosing)
        with problems:
            tiers.check_tiers(config, own)
        with problems:
            file = tiers.recording_file(config, own)
            # The scheduler records, and runs only on the first node of a replica.
            if file is not None and not parallel.node_rank_within_dp:
                check_recording(file)
        with problems:
            if transfer_kind(config, device) != "host":
                if config.pack_kv:
                    check_packing(current_platform.get_device_capability())
                _check_cupy()
        problems.raise_all()
        if config.disk is not None:
            tiers.make_folder(config.disk, own)


def _check_cupy() -> None:
    """Raise `UnsupportedError` if CuPy is not installed, or has no folder for compiled kernels.

    Does not import CuPy if it is installed.
    """
    try:
        if importlib.util.find_spec("cupy") is None:
            import_cupy()
        make_kernel_cache()
    except DeviceError as error:
        raise UnsupportedError(str(error)) from error

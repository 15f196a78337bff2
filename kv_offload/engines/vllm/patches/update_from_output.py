"""Applies the ranks' reports before vLLM processes the tokens of their step.

vLLM 0.31 to 0.33 mishandles a failed synchronous load: with asynchronous scheduling it rewinds a
running request's computed tokens but not its placeholders, and then fails an assertion or computes
a token at the wrong position. So requests that computed with missing KV are ended here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kv_offload.engines.vllm import requests
from kv_offload.engines.vllm.locate import connectors_in, connectors_with_reports

logger = logging.getLogger(__name__)


def apply_reports_first(
    original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Run around `Scheduler.update_from_output`.

    If an error hides which requests computed with wrong KV, all requests of the step are ended.
    """
    stranded: set[str] = set()
    try:
        ended = _apply_reports(self, model_runner_output.kv_connector_output, stranded)
    except Exception:
        lost = set(scheduler_output.num_scheduled_tokens)
        logger.exception(
            "kv-offload: an error while looking for requests with wrong KV: the %d requests of "
            "this step end, because any of them may be affected. Please report this",
            len(lost),
        )
        ended = requests.end_lost(self, lost)
    outputs = original(self, scheduler_output, model_runner_output)
    if ended:
        requests.add_ends(outputs, ended)
    for connector in connectors_in(self.connector):
        if connector.loaded:  # vLLM did not ask, because no rank had anything to report
            requests.report_loaded(self)
    if stranded:  # rare
        requests.make_room(self, stranded)
    return outputs


def _apply_reports(engine_scheduler: Any, reported: Any, stranded: set[str]) -> list[Any]:
    """Apply the ranks' reports; return the requests that ended with an error.

    Adds to `stranded` the loaded requests that block each other from running.
    """
    ended: list[Any] = []
    reports = getattr(reported, "kv_connector_worker_meta", None)
    for connector, report in connectors_with_reports(engine_scheduler.connector, reports):
        if reported is not None and reported.finished_recving:
            _drop_false_names(engine_scheduler, connector, reported)
        offload = connector.offload_scheduler
        if reported is not None and reported.invalid_block_ids:
            offload.others_load_failed()  # ours name no blocks
        connector.apply_rank_reports(report)
        effects = offload.take_effects()
        stranded |= effects.stranded
        # Leave failed loads for later, in case an error occurs before they are handled.
        connector.loaded |= effects.loaded - effects.failed
        if effects.tainted is not None:
            ended += requests.end_lost(engine_scheduler, effects.tainted)
        if effects.failed:
            recomputes = offload.config.on_load_failure == "recompute"
            ended += requests.report_failed(engine_scheduler, effects.failed, recomputes=recomputes)
            connector.loaded |= effects.failed
    return ended


def _drop_false_names(engine_scheduler: Any, connector: Any, reported: Any) -> None:
    """Drop other connectors' reports of having received requests that ours loads or loaded.

    In 0.31, Mooncake's connector reports this when it has nothing to fetch. vLLM would then run the
    request before our load has ended, free its blocks, or end with an error.
    """
    received = reported.finished_recving & engine_scheduler.requests.keys()
    reported.finished_recving = {name for name in received if not connector.loads(name)}

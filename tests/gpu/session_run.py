"""Run by `test_sessions.py` in a separate process: a session with drafts, token by token.

usage: python -m tests.gpu.session_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.harness import Drafts, draft_head, engine, random_tokens
from tests.engine.test_sessions import serve
from tests.gpu.engine_run import SETTINGS, corrupt
from tests.support.processes import be_run

PARTS = [random_tokens(tokens, seed) for seed, tokens in enumerate((600, 390, 90, 700), start=50)]


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    settings = {**SETTINGS, **arguments}
    if settings.pop("draft_head", False):
        settings["speculative_config"] = draft_head(Path(models))
    result: dict[str, Any] = {}
    with engine(Path(models), kind, **settings) as plain:
        text = serve(plain, "session", PARTS)
        result["expected"] = [text, *plain.generate([text], max_tokens=16)]
    with engine(Path(models), kind, {}, **settings) as ours:
        result["asynchronous"] = ours.core.batch_queue is not None
        drafts = Drafts(ours)
        answered = serve(ours, "session", PARTS)
        result["drafts_accepted"] = drafts.take()[1]
        ours.settle()
        result["answers"] = [answered, *ours.reload([text], max_tokens=16)]
        result["cached_tokens"], result["blocks_loaded"] = ours.cached_tokens, ours.blocks_loaded()
        ours.settle()
        ours.forget()
        assert ours.rank.transfer.wait(10)
        corrupt(ours.slots, kind)
        result["corrupted"] = ours.generate([text], max_tokens=16)
        ours.assert_nothing_left()
    return result


if __name__ == "__main__":
    be_run(main, processes=False)

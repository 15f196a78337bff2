"""An engine's recording of its requests can be replayed."""

from __future__ import annotations

from kv_offload.simulation.replay import replay
from kv_offload.simulation.trace import read_trace
from tests.engine.harness import offloading, plain_answers, prompts_with_shared_prefix

SHARED = 1100
PROMPTS = prompts_with_shared_prefix(SHARED)


def test_a_recorded_trace_has_the_hits_of_the_engine(model_folder, tmp_path):
    trace = tmp_path / "trace.jsonl"
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, plugin={"record_trace": str(trace)}) as ours:
        assert ours.generate(PROMPTS) == expected
        assert ours.reload(PROMPTS) == expected
        assert ours.totals["trace_errors"] == 0
    # `offloading` sends a short prompt to check that nothing is left.
    recorded = [one for one in read_trace(trace) if one.hash_ids]
    assert sorted(one.input_length for one in recorded) == sorted(2 * [*map(len, PROMPTS)])
    assert {one.output_length for one in recorded} == {8}
    assert {one.block_tokens for one in recorded} == {512}
    hits = [replay(recorded[:count], "lru", 100).hits for count in range(1, 9)]
    assert hits == [count * (SHARED // 512) for count in range(8)]

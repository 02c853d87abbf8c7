"""The timeline of a run from the traces of its processes."""

import json
from pathlib import Path

from headrace.comm.clock import Clock
from headrace.comm.trace import Trace
from headrace.launch.report.timeline import Timeline


def test_a_timeline_puts_processes_with_different_clocks_on_one_axis(tmp_path: Path):
    for name in ("a", "b"):
        trace = Trace(tmp_path, name, Clock())
        trace.enter("busy", version=1)
        trace.enter("busy", version=1)
        trace.enter("idle")
        trace.counters(load=0.5)
        trace.close()
    path = tmp_path / "trace" / "b.jsonl"
    head, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    moved = [head | {"clock": head["clock"] + 1e6}, *({**line, "t": line["t"] + 1e6} for line in rest)]
    path.write_text("".join(json.dumps(line) + "\n" for line in moved) + '{"state": "killed in the mid')
    timeline = Timeline.read(tmp_path)
    starts = {name: [span.start for span in spans] for name, spans in timeline.spans.items()}
    assert [span.state for span in timeline.spans["b"]] == ["busy", "idle"]
    assert abs(starts["a"][0] - starts["b"][0]) < 1.0
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"} and min(e.get("ts", 0) for e in events) >= 0


def test_the_trace_of_a_long_run_has_all_states_and_a_part_of_the_samples(tmp_path: Path):
    (tmp_path / "trace").mkdir()
    lines: list[dict[str, object]] = [{"process": "a", "clock": 0.0, "wall": 0.0}]
    for t in range(100):
        lines += [{"state": "generate", "t": t, "d": 1}, {"t": t, "values": {"running": t}}]
    path = tmp_path / "trace" / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, part = Timeline.read(tmp_path), Timeline.read(tmp_path, path.stat().st_size // 4)
    assert part.spans == whole.spans and len(whole.samples["a"]) == 100
    assert len(part.samples["a"]) == 20 and part.samples["a"][-1] == whole.samples["a"][-1]

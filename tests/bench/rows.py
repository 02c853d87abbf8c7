"""Rows through the program: from two rollouts, over two storage units with two copies, to the trainer.

    python -m bench.rows hub FOLDER STORE_ADDRESS
    python -m bench.rows relay FOLDER STORE_ADDRESS INDEX
    python -m bench.rows rollout FOLDER STORE_ADDRESS INDEX

Each is a process. Store, hub, units, the rollouts' writer and the trainer's stream are those of a run; generating and training take
no time.
"""

import itertools
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from headrace.comm.fleet import StoreFleet
from headrace.comm.messages import LeaseGrant, LeaseRequest, StepTrained, Stop, TrainBatch, TrainingDone
from headrace.comm.recipe import CommSettings
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.launch.config.load import read_recipe
from headrace.relay.hub.loop import run
from headrace.relay.loop import serve_rows
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.replicated_rows import ReplicatedRows
from headrace.relay.queue.stream import ExperienceStream
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.row_writer import RowWriter

from .harness import BenchProcess, Measurement, Options, command

_SECRET = b"benchmark"
_PROMPTS, _SAMPLES, _STEPS = 32, 8, 24
_NUM_TOKENS = 8192
_LEAD = 4 * _PROMPTS
_BACKLOG = 64
_NUM_ROLLOUTS = _NUM_UNITS = 2
_DEADLINE_S = 300.0


def through_program(name: str, options: Options) -> list[Measurement]:
    """Rows of 8,192 tokens per second that the trainer has, all columns checked by their digests, from the second step on.

    And the CPU time of all processes for a row, without their start: what the rate would be on cores without other work.
    """
    hosted = StoreServer("127.0.0.1", _SECRET).start()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "data.jsonl").write_text('{"prompt": "p"}\n' * 1000)
        words = [("hub", folder, hosted.address)]
        for role, count in (("relay", _NUM_UNITS), ("rollout", _NUM_ROLLOUTS)):
            words += [(role, folder, hosted.address, str(index)) for index in range(count)]
        processes = [stack.enter_context(BenchProcess(command("rows", *each))) for each in words]
        fleet = StoreFleet.join(hosted.address, "actor", 0, _SECRET, {}, CommSettings())
        began = time.process_time()
        rate = _train(fleet)
        cpu_s = time.process_time() - began + sum(float(each.line("cpu").split()[1]) for each in processes)
        fleet.leave()
    hosted.close()
    cpu_ms = cpu_s / (_STEPS * _PROMPTS * _SAMPLES) * 1e3
    return [
        Measurement(name, "1,000 a second", rate, "1/s", rate / 1000),
        Measurement("rows-cpu", "two cores at 1,000", cpu_ms, "ms", 2 / cpu_ms),
    ]


def _train(fleet: StoreFleet) -> float:
    """The trainer: it takes the rows of each step; returns the rate from the end of the first step on."""
    mailbox, storage = fleet.open_mailbox("actor-0"), ReplicatedRows(fleet)
    stream = ExperienceStream(mailbox, storage, ["train"], steps=range(_STEPS), deadline_s=_DEADLINE_S).start()
    began, num_rows = 0.0, 0
    for step in range(_STEPS):
        is_complete = False
        while not is_complete:
            batch = stream.next()
            assert isinstance(batch, Batch) and isinstance(batch.row_batch, TrainBatch)
            num_rows += len(batch) * (step > 0)
            for row, token_ids in zip(batch.rows, batch["response_ids"], strict=True):
                assert token_ids.shape == (_NUM_TOKENS,) and token_ids[0] == row.row.sample
            is_complete = batch.row_batch.ends_step
        mailbox.send("hub", StepTrained(step))
        began = began or time.monotonic()
    seconds = time.monotonic() - began
    mailbox.send("hub", TrainingDone({}))
    stream.close()
    storage.close()
    return num_rows / seconds


def _rollout(folder: str, address: str, index: str) -> None:
    """A rollout: it leases a few groups and finishes all of their samples at once."""
    fleet = StoreFleet.join(address, "rollout", int(index), _SECRET, {}, CommSettings())
    mailbox = fleet.open_mailbox(fleet.name)
    writer = RowWriter(mailbox, ReplicatedRows(fleet), _DEADLINE_S)
    writer.start()
    responses = [[sample, *range(1, _NUM_TOKENS)] for sample in range(_SAMPLES)]
    logprobs = [-0.5] * _NUM_TOKENS
    with waiting("the hub", "the end of the run", _DEADLINE_S) as wait:
        for number in itertools.count(1):
            mailbox.send("hub", LeaseRequest((fleet.incarnation << 32) + number, 0, 8))
            while True:
                wait.check()
                envelope = mailbox.receive(1.0)
                if envelope is not None and isinstance(envelope.message, LeaseGrant):
                    break
                if envelope is not None and isinstance(envelope.message, Stop):
                    writer.close()
                    fleet.leave()
                    return
            for lease in envelope.message.leases:
                for sample in lease.samples:
                    done = LeasedRow(lease.group.row(sample), lease.attempt, 0, {}, reward=float(sample))
                    done.completion = Completion(sample, [1] * 256, responses[sample], logprobs, "stop")
                    writer.submit(done)
            wait.until(lambda: writer.backlog < _BACKLOG)


def _relay(folder: str, address: str, index: str) -> None:
    fleet = StoreFleet.join(address, "relay", int(index), _SECRET, {}, CommSettings())
    mailbox, unit = fleet.open_mailbox(fleet.name), fleet.host_rows()
    fleet.announce(unit=unit.address)
    serve_rows(fleet, Path(folder), mailbox, unit)
    unit.close()
    fleet.leave()


def _hub(folder: str, address: str) -> None:
    words = {
        "run.dir": folder, "run.steps": _STEPS, "data.path": f"{folder}/data.jsonl",
        "batch.prompts_per_step": _PROMPTS, "batch.samples_per_prompt": _SAMPLES, "queue.lead": _LEAD,
    }  # fmt: skip
    recipe = read_recipe(None, [f"{key}={value}" for key, value in words.items()])
    fleet = StoreFleet.join(address, "hub", 0, _SECRET, {}, recipe.comm)
    run(fleet, recipe)
    fleet.leave()


if __name__ == "__main__":
    started = time.process_time()
    {"hub": _hub, "relay": _relay, "rollout": _rollout}[sys.argv[1]](*sys.argv[2:])
    print("cpu", time.process_time() - started, flush=True)

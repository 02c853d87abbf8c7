"""A server without a run: one engine in this process, with the weights of a folder, behind the front."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...comm.recipe import Recipe
from ...relay.weights.layout import Layout
from ...trainer.policy.model import Policy, default_device, load_policy, load_tokenizer
from ...trainer.policy.tensor_parallel import splits_for
from ..engine.engine import Engine
from ..engine.sampling import SamplingParams
from ..generators.builtin import engine_settings
from .access import Access
from .app import make_app
from .desk import Desk
from .front import Front, ServedModel
from .server import HttpThread, listen

MOST_RUNNING = 64
"""Sequences that decode together, if `generator.max_running` does not say so; on a GPU four times as many."""
QUEUED = 4
"""Sequences that may wait for each that can run."""
_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the command."""

    name: str
    """The model's name in requests."""
    host: str = "127.0.0.1"
    port: int = 0
    keys: Sequence[str] = ()
    timeout_s: float = 600.0
    """Longest time of one request."""
    receipt_key: bytes = b""
    """Of the run that has trained the model (`relay.receipts`); empty for none."""


class LocalServer:
    """Serves the model of `model.path`; `run` is the loop of its engine, in the thread that calls it."""

    def __init__(self, recipe: Recipe, version: int, options: ServeOptions) -> None:
        """version: the steps that have trained the model. Raises `SettingError`."""
        access = Access(options.host, options.keys)
        opened = listen(
            options.host, options.port
        )  # before the model is loaded, since a port that is taken is a usual mistake
        try:
            self.engine = open_engine(recipe)
            policy = self.engine.policy
            digest = _digest_as_published(policy, recipe)
            tokenizer = load_tokenizer(recipe.model.path)  # the engine's is used in another thread
            model = ServedModel(options.name, policy.context, policy.vocab_size, tokenizer, recipe.data)
            self.desk = Desk((1 + QUEUED) * self.engine.scheduler.max_running, version, digest)
            front = Front(model, self.desk, options.timeout_s, options.receipt_key)
            self.http = HttpThread(make_app(front, access), opened)
        except BaseException:
            opened.close()
            raise

    def start(self) -> None:
        """Begin to answer; the engine works in `run` alone."""
        self.http.start()

    def run(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Generate for the requests until `is_ended`, or an exception such as `KeyboardInterrupt`."""
        while not is_ended():
            self.http.check()
            self.desk.turn(self.engine, _IDLE_S)

    def close(self) -> None:
        """End the connections."""
        self.http.close()


def _digest_as_published(policy: Policy, recipe: Recipe) -> str:
    """The digest that a run has for these weights; empty for a run with an adapter, which publishes no whole weights."""
    if recipe.lora.rank:
        return ""
    weights = policy.weights()
    layout = Layout.of(weights, policy.dtype, recipe.rollout.tp, splits_for(weights, policy.config))
    return layout.digest_of(weights)


def open_engine(recipe: Recipe) -> Engine:
    """The engine. It has answered once: exact mode checks the machine then."""
    policy = load_policy(recipe.model.path, recipe.model.compute_type, default_device())
    usual = MOST_RUNNING * (4 if policy.device.type == "cuda" else 1)
    max_running = recipe.generator.max_running or usual
    engine = Engine(
        policy, max_running=max_running, tokenizer=load_tokenizer(recipe.model.path), **engine_settings(recipe)
    )
    engine.generate([[0]], SamplingParams(max_new_tokens=1))
    return engine

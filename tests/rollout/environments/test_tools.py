"""Calls of tools in a turn: how they are written, and what the policy gets back."""

import asyncio

import pytest

from headrace.comm.plugins import load_object
from headrace.relay.dataset.tool_calls import ToolCall, parse_calls
from headrace.rollout.environments.tools import ToolEnvironment, tools_of
from headrace.rollout.rewards.sandbox import SandboxError

FILE = '''
def add(left: int, right: int = 1) -> int:
    """
    Add two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right

def bare(x):
    return x

class Stock:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **row):
        self.level = 10

    def take(self, number: int) -> str:
        """
        Take from the stock.

        Args:
            number: How many.
        """
        self.level -= number
        self.reward += 0.25
        return f"{self.level} left"
'''


def add(left: int, right: int = 1) -> int:
    return left + right


async def shout(text: str) -> str:
    return text.upper()


def run(environment: ToolEnvironment, prompt: object, *turns: str) -> list[tuple]:
    async def talk() -> list[tuple]:
        await environment.reset(prompt=prompt)
        return [tuple(await environment.step(turn)) for turn in turns]

    return asyncio.run(talk())


def test_a_chat_models_calls_become_tool_messages_in_their_order():
    turn = (
        'so <tool_call>\n{"name": "add", "arguments": {"left": 2, "right": 3}}\n</tool_call>'
        '<tool_call>{"name": "shout", "arguments": {"text": "a"}}</tool_call>'
    )
    (first, last) = run(ToolEnvironment([add, shout]), [{"role": "user", "content": "?"}], turn, "it is 5")
    assert first[0] == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "shout", "content": "A"},
    ]
    assert not first[2] and last[2], "a turn without a call is the last"


def test_a_text_models_call_has_one_argument_between_tags():
    first, last = run(ToolEnvironment([shout]), "prompt", "I <shout>say</shout>", "done")
    assert first[:3:2] == ("<result>SAY</result>", False) and last[2]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("<tool_call>{not json}</tool_call>", 'JSON with \\"name\\"'),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "unknown tool 'sub'; known: add"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "add", "arguments": {"up": 1}}</tool_call>', "TypeError"),
        ('<tool_call>["add"]</tool_call>', 'JSON with \\"name\\"'),
        ("<tool_call>" + "[" * 100_000, 'JSON with \\"name\\"'),
        ('<tool_call>{"name": "add", "arguments": "' + "[" * 100_000 + '"}', "must be JSON"),
    ],
)
def test_the_policy_reads_what_is_wrong_with_its_call(turn: str, problem: str):
    (step,) = run(ToolEnvironment([add]), [{"role": "user", "content": "?"}], turn)
    assert problem in step[0][0]["content"] and '"error"' in step[0][0]["content"]


def test_an_argument_may_have_any_name():
    def plot(function: str) -> str:
        return function

    turn = '<tool_call>{"name": "plot", "arguments": {"function": "x^2"}}</tool_call>'
    (step,) = run(ToolEnvironment([plot]), [{"role": "user", "content": "?"}], turn)
    assert step[0][0]["content"] == "x^2"


def test_arguments_may_be_json_within_json_and_a_cut_call_counts():
    assert parse_calls('<tool_call>{"name": "add", "arguments": "{\\"left\\": 1}"}', ["add"], is_chat=True) == [
        ToolCall("add", {"left": 1})
    ]
    assert parse_calls("<add>1", ["add"], is_chat=False) == [ToolCall("add", ["1"])]


def test_a_class_without_step_offers_its_methods_as_tools_and_its_reward(tmp_path):
    file = tmp_path / "stock.py"
    file.write_text(FILE)
    stock = load_object("environment.path", f"{file}:Stock")()
    assert [tool.__name__ for tool in tools_of(stock)] == ["take"]
    turn = '<tool_call>{"name": "take", "arguments": {"number": 4}}</tool_call>'
    steps = run(ToolEnvironment(tools_of(stock), stock), [{"role": "user", "content": "?"}], turn + turn, turn, "end")
    assert [message["content"] for message in steps[0][0]] == ["6 left", "2 left"]
    assert [step[1] for step in steps] == [0.5, 0.25, 0.0] and steps[-1][2]


def test_a_fault_of_the_host_is_no_answer_to_the_policy():
    def program(code: str) -> str:
        raise SandboxError("no sandbox here")

    with pytest.raises(SandboxError, match="no sandbox here"):
        run(ToolEnvironment([program]), "prompt", "<program>1</program>")

"""The policy that most tests of the rollout use."""

from pathlib import Path

import pytest
from support.policies import tiny_policy


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy, which no test changes."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))

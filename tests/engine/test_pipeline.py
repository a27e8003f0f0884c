"""A model over one, two and three processes gives what it gives whole, to many at once, and lets go of it all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_kit import PipelineUnderTest, plain_greedy, session, write_tiny_llama

PROMPTS = ([5, 17, 3], [9] * 40, list(range(1, 60)), [42])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=[(), (3,), (1, 4)], ids=["1 seat", "2 seats", "3 seats"])
def pipeline(request: pytest.FixtureRequest, model: Path) -> Iterator[PipelineUnderTest]:
    pipeline = PipelineUnderTest(model, request.param)
    yield pipeline
    pipeline.close()


def test_greedy_tokens_equal_the_whole_models(pipeline: PipelineUnderTest, model: Path):
    origin = pipeline.origin()
    for prompt in PROMPTS:
        assert origin.ids(origin.open(session(prompt, 12))) == plain_greedy(model, prompt, 12)
    origin.close()
